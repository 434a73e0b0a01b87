// Drawing: each function takes plain data and a budget, and fills one element. Nothing here asks the server.

const SVG = "http://www.w3.org/2000/svg";
const NONE = "var(--none)";
const RAMP = [[60, 20, 110], [140, 41, 129], [222, 73, 104], [254, 159, 109], [252, 253, 191]];

export const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export const shorten = (text, length) => (text.length <= length ? text : text.slice(0, Math.max(1, length - 1)).trimEnd() + "…");
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// -- the search tree

export function tree(place, data, budget) {
  const width = Math.max(260, place.clientWidth);
  const rates = data.layers.layers.map((layer) => layer.rate);
  const glyph = 17, line = 26, top = 24;
  const small = rates.every(([y, x]) => y <= 4 && x <= 4);
  const selection = width < 520 ? 0 : Math.max(72, rates.length * (small ? glyph : 30) + 16);
  const weight = width < 400 ? 0 : 92;
  const value = width - selection - weight - 10; // where a state's own confidence ends
  const deepest = Math.max(1, ...data.tree.map((node) => node.depth));
  const indent = Math.min(26, (value - 150) / (deepest + 1));
  // Beside another column every state has its place from the start: nothing jumps, and no room is blank. Alone, it grows.
  const alone = matchMedia("(max-width: 56rem)").matches;
  const shown = data.tree.filter((node) => node.index < budget), laid = alone ? shown : data.tree;
  const row = new Map(laid.map((node, k) => [node.index, top + line * (k + 0.5)]));
  const x = (depth) => 12 + indent * depth;
  const depth = new Map(data.tree.map((node) => [node.index, node.depth]));
  const last = data.tree.find((node) => node.index === budget - 1);
  const fresh = (node) => node.index > 0 && last.index > 0 && node.parent === last.parent && node.layer === last.layer;
  const heaviest = Math.max(...data.states.slice(0, budget).map((s) => s.weight)) || 1;
  const total = data.states.slice(0, budget).reduce((sum, s) => sum + s.weight, 0) || 1;
  const height = top + line * laid.length + 6;
  const classes = data.task === "classification";

  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": words(data, budget) });
  out.append(svg("text", { class: "quiet", x: 2, y: 14 }, classes ? "state and its own answer" : "state: pixels it changes"));
  out.append(svg("text", { class: "quiet", x: value, y: 14, "text-anchor": "end" }, "confidence"));
  if (selection) out.append(svg("text", { class: "quiet", x: value + 14, y: 14 }, "selection"));
  if (weight) out.append(svg("text", { class: "quiet", x: width - weight, y: 14 }, "weight"));
  out.append(svg("path", { class: "rule", d: `M0 ${top - 3}H${width}` }));
  const chips = svg("g"), labelled = new Set();
  for (const node of shown) {
    if (fresh(node)) {
      out.append(svg("rect", { class: "fresh", x: 0, y: row.get(node.index) - line / 2, width, height: line, rx: 4 }));
    }
  }
  for (const node of laid) {
    if (node.index < budget) continue;
    const [px, py, y] = [x(depth.get(node.parent)), row.get(node.parent), row.get(node.index)];
    out.append(svg("g", { class: "ghost" },
      svg("path", { class: "edge", d: `M${px} ${py}V${y}H${x(node.depth)}` }),
      svg("circle", { class: "node", cx: x(node.depth), cy: y, r: 4 }),
      svg("text", { x: x(node.depth) + 14, y: y + 4.5 }, `state ${node.index + 1}`)));
  }
  for (const node of shown) {
    if (node.parent === null) continue;
    const [px, py, y] = [x(depth.get(node.parent)), row.get(node.parent), row.get(node.index)];
    out.append(svg("path", { class: "edge", d: `M${px} ${py}V${y}H${x(node.depth)}` }));
    const group = `${node.parent} ${node.layer}`;
    if (node.layer && !labelled.has(group)) {
      labelled.add(group);
      const label = indent >= 24 ? `L${node.layer}` : `${node.layer}`;
      chips.append(
        svg("rect", { class: "chip", x: px - 10, y: y - 15, width: 20, height: 13, rx: 4 }),
        svg("text", { class: "quiet", x: px, y: y - 5, "text-anchor": "middle" }, label),
      );
    }
  }
  for (const node of shown) {
    const state = data.states[node.index], y = row.get(node.index), at = x(node.depth);
    const colour = state.colour || NONE;
    const share = classes ? state.probability : state.confidence;
    const text = classes ? state.name : node.index === 0 ? "plain network" : `${percent(state.changed, 1)} differ`;
    const room = Math.floor((value - at - 14 - 44) / 7);
    const strong = node.index === 0 ? "strong" : null;
    const made = svg("g", { class: fresh(node) ? "state new" : "state", "data-index": node.index },
      svg("title", {}, told(data, node)),
      svg("circle", { class: "node", cx: at, cy: y, r: 3 + 6 * share, style: { fill: classes ? colour : "var(--accent)" } }),
      svg("text", { class: strong, x: at + 14, y: y + 4.5 }, shorten(text + (classes && node.index === 0 ? " (plain)" : ""), room)),
      svg("text", { class: strong, x: value, y: y + 4.5, "text-anchor": "end" }, percent(share)));
    if (selection && state.view) made.append(svg("text", { class: "quiet", x: value + 14, y: y + 4 }, shorten(state.view, Math.floor(selection / 7))));
    else if (selection) made.append(...glyphs(state.selection, rates, value + 14, y, small, classes ? colour : "var(--accent)"));
    if (weight) {
      const long = (weight - 40) * state.weight / heaviest;
      made.append(
        svg("rect", { x: width - weight, y: y - 4, width: Math.max(1, long), height: 8, rx: 1.5, style: { fill: classes ? colour : "var(--accent)" } }),
        svg("text", { class: "quiet", x: width - weight + long + 4, y: y + 4 }, percent(state.weight / total)));
    }
    out.append(made);
  }
  out.append(chips);
  place.replaceChildren(out);
}

function told(data, node) {
  const state = data.states[node.index];
  const where = (state.view ? `${state.view}, ` : "") + state.selection.map(([y, x]) => (y || x ? `${y},${x}` : "0")).join(" ");
  const from = node.parent === null ? "the plain network" : !node.layer ? "a further look" : `from state ${node.parent + 1}, layer ${node.layer} changed`;
  const says = data.task === "classification" ? `${state.name} ${percent(state.probability, 1)}` : `${percent(state.changed, 1)} of the pixels differ from the plain answer`;
  return `State ${node.index + 1} (${where}), ${from}: ${says}, criterion ${state.criterion}`;
}

function words(data, budget) {
  const latest = data.tree.filter((node) => node.index < budget).sort((a, b) => b.index - a.index)[0];
  return `Search tree with ${budget} of ${data.states.length} states. Newest: ${told(data, latest)}`;
}

export function glyphs(selections, rates, left, y, small, colour) {
  if (!small) return [svg("text", { class: "quiet", x: left, y: y + 4 }, selections.map(([a, b]) => (a || b ? `${a},${b}` : "0")).join("  "))];
  const side = 12;
  return selections.flatMap(([sy, sx], layer) => {
    const [ry, rx] = rates[layer], x0 = left + 17 * layer, y0 = y - side / 2, w = side / rx, h = side / ry;
    const lines = [];
    for (let k = 1; k < rx; k++) lines.push(`M${x0 + k * w} ${y0}v${side}`);
    for (let k = 1; k < ry; k++) lines.push(`M${x0} ${y0 + k * h}h${side}`);
    return [
      svg("rect", { class: sy || sx ? null : "kept", x: x0 + sx * w, y: y0 + sy * h, width: w, height: h, style: sy || sx ? { fill: colour } : {} }),
      svg("path", { class: "cell", d: `M${x0} ${y0}h${side}v${side}h${-side}Z${lines.join("")}` }),
    ];
  });
}

// -- plain against enhanced

export function bars(place, data, budget) {
  const enhanced = data.enhanced[budget - 1];
  const order = enhanced.map((_, k) => k).sort((a, b) => enhanced[b] - enhanced[a]);
  const first = data.plain.indexOf(Math.max(...data.plain));
  const shown = data.task === "classification" ? order.slice(0, 5) : order.filter((k) => enhanced[k] + data.plain[k] > 0).slice(0, 9);
  if (!shown.includes(first)) shown[shown.length - 1] = first;
  const top = Math.max(...shown.map((k) => Math.max(enhanced[k], data.plain[k])), 1e-9);
  const one = (value, fill) => element("div", { class: "row" },
    element("div", {}, element("i", { style: { width: percent(value / top, 1), ...fill } })),
    element("span", {}, percent(value, 1)));
  place.replaceChildren(
    element("p", { class: "soft" }, element("span", { class: "key first" }), "plain", element("span", { class: "key full" }), "enhanced"),
    ...shown.map((k) => {
      const { name, colour } = data.classes[k], fill = colour || NONE;
      return element("div", { class: "class", "data-name": name, "data-plain": data.plain[k], "data-enhanced": enhanced[k] },
        element("p", {}, name), one(data.plain[k], { borderColor: fill }), one(enhanced[k], { borderColor: fill, background: fill }));
    }));
}

export function strip(place, data, budget) {
  place.replaceChildren(...data.states.map((state, k) => {
    const colour = state.colour || NONE;
    return element("i", { class: k < budget ? "" : "later", title: `state ${k + 1}: ${state.name} ${percent(state.probability)}`,
      style: { borderColor: colour, background: k < budget ? colour : "transparent" } });
  }));
  const firsts = new Map();
  for (const state of data.states.slice(0, budget)) firsts.set(state.name, (firsts.get(state.name) || 0) + 1);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", [...firsts].map(([name, count]) => `${name}: ${count}`).join(", "));
}

// -- cost

export function cost(place, data, budget) {
  const width = Math.max(240, place.clientWidth), height = 150, left = 34, bottom = 22, right = 12;
  const count = data.cost.length, highest = Math.max(count, data.cost[count - 1]);
  const x = (b) => left + (count > 1 ? (b - 1) / (count - 1) : 0) * (width - left - right);
  const y = (value) => height - bottom - (value / highest) * (height - bottom - 10);
  const line = (from, to) => data.cost.slice(from, to).map((c, k) => `${x(from + k + 1).toFixed(1)} ${y(c).toFixed(1)}`).join("L");
  const now = data.cost[budget - 1];
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `${budget} states cost ${now.toFixed(1)} times a plain forward; running the network anew for each would cost ${budget} times` });
  out.append(svg("path", { class: "rule", d: `M${left} ${y(0)}H${width - right}` }));
  for (const value of [1, Math.round(highest)]) {
    out.append(svg("text", { class: "quiet", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${value}x`));
  }
  out.append(svg("text", { class: "quiet", x: left, y: height - 6 }, "1 state"));
  if (count > 1) out.append(svg("text", { class: "quiet", x: width - right, y: height - 6, "text-anchor": "end" }, `${count} states`));
  out.append(svg("path", { class: "dash", d: `M${x(1)} ${y(1)}L${x(count)} ${y(count)}` }));
  out.append(svg("path", { class: "line later", d: `M${line(0, count)}` }));
  out.append(svg("path", { class: "line", d: `M${line(0, budget)}` }));
  out.append(svg("circle", { class: "mark", cx: x(budget), cy: y(now), r: 4.5 }));
  place.replaceChildren(out, element("p", { class: "soft" },
    `${now.toFixed(1)}x the MACs of a plain forward: states share what they have in common. Dashed: the network run anew for each state, ${budget}x.`));
}

// -- images

export class Images {
  constructor(place, data, photo) {
    this.data = data;
    this.photo = photo;
    this.heat = data.heat && bytes(data.heat.data);
    const raw = data.maps && bytes(data.maps.data);
    this.maps = raw && (data.maps.bytes === 2 ? new Uint16Array(raw.buffer) : raw);
    this.canvases = {};
    const names = this.maps
      ? { seen: "what the network sees", plain: "plain", enhanced: "enhanced", differ: "", heat: "where the states disagree" }
      : { seen: "what the network sees", heat: "where the states disagree" };
    if (!this.heat) delete names.heat;
    if (data.right) names.truth = "truth";
    const { width, height } = data.image;
    this.scale = Math.max(1, Math.min(8, Math.ceil(320 / Math.max(width, height))));
    place.replaceChildren(...Object.entries(names).map(([name, caption]) => {
      const canvas = element("canvas", { id: `canvas-${name}`, width: width * this.scale, height: height * this.scale, role: "img", "aria-label": caption });
      const words = element("figcaption", {}, caption);
      this.canvases[name] = [canvas, words];
      const scale = name === "heat" && element("div", { class: "scale" }, "agree", element("i"), `${data.heat.top.toFixed(2)} nats`);
      return element("figure", {}, canvas, ...(scale ? [scale] : []), words);
    }));
    this.base("seen");
    if (this.maps) this.classes("plain", 1, () => true);
    if (data.right) this.classes("truth", data.right.length + 1, () => true); // behind the answers
  }

  draw(budget) {
    if (this.maps) {
      const size = this.data.maps.width * this.data.maps.height, from = (budget - 1) * size;
      this.classes("enhanced", budget, () => true);
      this.classes("differ", budget, (k) => this.maps[from + k] !== this.maps[k], true);
      const words = `where they differ: ${percent(this.data.changed[budget - 1], 1)}, in the new colour`;
      this.canvases.differ[1].textContent = words;
      this.canvases.differ[0].setAttribute("aria-label", words);
    }
    if (this.heat) this.warm(budget);
  }

  base(name, gray = false) {
    const [canvas] = this.canvases[name], context = canvas.getContext("2d");
    context.imageSmoothingEnabled = this.scale < 3;
    context.filter = gray ? "grayscale(1)" : "none";
    context.drawImage(this.photo, 0, 0, canvas.width, canvas.height);
    context.filter = "none";
    return context;
  }

  // Colours of a class map over the photograph, where `at` says so.
  classes(name, budget, at, full = false) {
    const { width, height } = this.data.maps, size = width * height, from = (budget - 1) * size;
    const colours = this.data.classes.map(({ colour }) => [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16)));
    this.over(name, width, height, false, full, (k) => {
      const which = this.maps[from + k];
      const shown = at(k) && (full || !this.data.classes[which].background);
      return [...colours[which], shown ? (full ? 255 : 140) : 0];
    });
  }

  warm(budget) {
    const { width, height } = this.data.heat, from = (budget - 1) * width * height;
    this.over("heat", width, height, width < 32, true, (k) => {
      const value = this.heat[from + k] / 255, place = Math.min(value * 4, 3.999), low = Math.floor(place);
      const mixed = RAMP[low].map((c, i) => c + (RAMP[low + 1][i] - c) * (place - low));
      return [...mixed, 255 * Math.min(0.9, 1.3 * Math.sqrt(value))];
    });
  }

  over(name, width, height, smooth, gray, pixel) {
    const context = this.base(name, gray), layer = new OffscreenCanvas(width, height), inner = layer.getContext("2d");
    const image = inner.createImageData(width, height);
    for (let k = 0; k < width * height; k++) image.data.set(pixel(k), 4 * k);
    inner.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = smooth;
    context.imageSmoothingQuality = "high";
    context.drawImage(layer, 0, 0, context.canvas.width, context.canvas.height);
  }
}

// -- layers

const macs = (count) => (count < 1e8 ? `${(count / 1e6).toPrecision(2)} MMACs` : `${(count / 1e9).toFixed(2)} GMACs`);

export function layers(rows, note, leftOut, report) {
  const [height, width] = report.image;
  note.textContent = `${report.layers.length} subsampling layers, ${report.states.toLocaleString("en")} states at ${height}x${width}; a plain forward (${macs(report.macs)}) uses one of them. A later layer costs less to look at again.`;
  rows.replaceChildren(...report.layers.map((layer) => {
    const [ry, rx] = layer.rate;
    const grid = element("span", { class: "grid", "aria-hidden": "true", style: { gridTemplateColumns: `repeat(${Math.min(rx, 4)}, auto)` } },
      ...Array.from({ length: Math.min(ry, 4) * Math.min(rx, 4) }, () => element("i")));
    return element("tr", {},
      element("td", {}, String(layer.index)),
      element("td", {}, grid, `${ry}x${rx}: keeps 1 of ${ry * rx}`),
      element("td", {}, report.searched.includes(layer.index) ? "yes" : "no"),
      element("td", { class: "n" }, layer.map.join("x")),
      element("td", { class: "n" }, `${percent(layer.cost)} of a forward`),
      element("td", {}, layer.ops.map((op) => `${op.path} (${op.kind})`).join(", ")));
  }));
  leftOut.replaceChildren(...report.left_out.map((x) => element("li", {}, `left out: ${x.op}: ${x.reason}`)),
    ...report.unknown.map((x) => element("li", {}, `unknown: ${x}; strided ops after it may be left out`)));
}
