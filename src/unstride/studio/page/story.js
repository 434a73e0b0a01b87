// An image's way through the stages of a recipe: looks, the gate between two stages, the answer and its cost so far.

import { element, glyphs, percent, svg } from "./draw.js";

const times = (cost) => `${cost.toFixed(2)}x`;

// Right or wrong, where it is known; a word for those who cannot see the colour.
export function mark(right) {
  if (right === null) return "";
  return element("span", { class: right ? "mark right" : "mark wrong" }, right ? "✓ right" : "✗ wrong");
}

const correct = (data, name) => (data.truth === null ? null : data.accepted.includes(name));

// What is said with the first k + 1 looks, and whether that is right.
export function said(data, k) {
  if (data.task !== "classification") {
    const right = data.right && data.right[k];
    return { text: right === null ? `${percent(data.changed[k], 1)} of the pixels change` : `${percent(right, 1)} of the pixels right`, right: null };
  }
  const values = k < 0 ? data.plain : data.enhanced[k], best = values.indexOf(Math.max(...values)), { name } = data.classes[best];
  return { text: `${name} ${percent(values[best])}`, right: correct(data, name) };
}

// Plain beside the answer beside the truth.
export function answers(place, data, k, title) {
  const cell = (name, text, sign, more) => element("div", { "data-of": name },
    element("span", {}, name), element("b", {}, text), sign, element("span", {}, more));
  const first = data.task === "classification" ? said(data, -1) : said(data, 0), last = said(data, k);
  const cells = [cell("plain", first.text, mark(first.right), "1.00x: one forward"), cell(title, last.text, mark(last.right), `${times(data.cost[k])} the cost of plain`)];
  if (data.truth !== null) cells.push(cell("truth", data.truth, "", "the label of this image"));
  place.replaceChildren(...cells);
}

export function story(place, data) {
  const full = Math.max(...data.story.map((stage) => stage.cost), 1);
  const parts = data.story.flatMap((stage, k) => [
    ...(k ? [between(stage)] : []),
    stageOf(data, stage, k, full),
  ]);
  place.replaceChildren(...parts);
}

function stageOf(data, stage, number, full) {
  const cards = stage.reached ? stage.looks.map((k) => card(data, k)) : [element("p", { class: "not" }, "not looked at")];
  const last = stage.looks[stage.looks.length - 1], now = last === undefined ? null : said(data, last);
  const lone = data.story.length === 1 && cards.length === 1 ? " lone" : "";
  return element("section", { class: (stage.reached ? "stage" : "stage unreached") + lone, style: { flexGrow: Math.max(1, stage.looks.length) } },
    element("h3", {}, `Stage ${number + 1}: ${stage.what}`),
    element("div", { class: "cards" }, ...cards),
    element("div", { class: "sofar" },
      now ? element("p", {}, "so far: ", element("b", {}, now.text), " ", mark(now.right)) : element("p", {}, "not paid for"),
      cost(stage, full)));
}

function card(data, k) {
  const look = data.states[k], still = look.selection.every(([y, x]) => !y && !x);
  const rates = data.layers.layers.map((layer) => layer.rate), small = rates.every(([y, x]) => y <= 4 && x <= 4);
  const classes = data.task === "classification";
  const own = classes ? `${look.name} ${percent(look.probability)}` : k === 0 ? "the plain map" : `${percent(look.changed, 1)} differ from plain`;
  const right = classes ? correct(data, look.name) : null;
  const state = still ? "plain state" : small
    ? svg("svg", { class: "picked", viewBox: `0 0 ${17 * rates.length} 14`, width: 17 * rates.length, height: 14, role: "img", "aria-label": `state ${look.selection.join(" ")}` },
      ...glyphs(look.selection, rates, 1, 7, true, "var(--accent)"))
    : `state ${look.selection.map(([y, x]) => `${y},${x}`).join(" ")}`;
  const image = element("img", { src: look.seen, alt: `what the network sees: ${look.view || "plain"}`, class: Math.max(...look.size) <= 128 ? "small" : null });
  return element("figure", { class: "card", "data-look": k },
    image,
    element("figcaption", {},
      element("b", {}, look.view || "plain"), element("span", { class: "soft" }, look.size.join("x"), " · ", state),
      element("span", { class: "own" }, own, " ", mark(right)),
      classes ? element("i", { class: "sure", style: { width: percent(look.probability, 1), background: look.colour || "var(--none)" } }) : ""));
}

// Cost so far as a bar; the mark is one plain forward.
function cost(stage, full) {
  return element("div", { class: "spent" },
    element("div", { class: "track" },
      element("i", { style: { width: percent(stage.cost / full, 1) } }),
      element("u", { style: { left: percent(1 / full, 1) }, title: "plain: 1x" })),
    element("span", {}, stage.reached ? `${times(stage.cost)} plain` : `would be ${times(stage.cost)}`));
}

function between(stage) {
  const { gate } = stage;
  if (!gate && !stage.asks) return element("div", { class: "gate always" }, drawn(true), element("p", {}, "no gate: every image goes on"));
  if (!gate) return element("div", { class: "gate unreached" }, drawn(false), element("p", {}, `where ${stage.asks}: not reached`));
  const value = gate.value.toFixed(2), bound = gate.below.toFixed(2);
  const words = gate.open ? `${gate.by} ${value} < ${bound}: looks again` : `${gate.by} ${value} ≥ ${bound}: stops here`;
  return element("div", { class: gate.open ? "gate open" : "gate closed" }, drawn(gate.open),
    element("b", {}, gate.open ? "gate open" : "gate closed"), element("p", {}, words),
    element("div", { class: "meter", "aria-hidden": "true" },
      element("i", { style: { width: percent(Math.min(1, gate.value), 1) } }), element("u", { style: { left: percent(Math.min(1, gate.below), 1) } })),
    element("p", { class: "soft" }, `${gate.by}: 0 knows nothing, 1 is certain`));
}

// Two posts; the leaf lies across the way, or is swung aside.
function drawn(open) {
  const leaf = open ? "M14 14L34 4V58L14 50ZM14 26L34 20M14 38L34 38" : "M14 14H86V50H14ZM14 26H86M14 38H86M38 14V50M62 14V50";
  return svg("svg", { class: "leaf", viewBox: "0 0 100 64", width: 100, height: 64, "aria-hidden": "true" },
    svg("path", { class: "post", d: "M10 6V60M90 6V60" }), svg("path", { class: "wing", d: leaf }),
    ...(open ? [svg("path", { class: "way", d: "M40 33H78M68 25L79 33L68 41" })] : []));
}
