// The page. What is chosen stands in the address, so that a link shows the same again: #networks=0&recipe=1&image=2

const at = (id) => document.getElementById(id);
const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;
const times = (cost) => `${cost.toFixed(2)}x`;
const chosen = { networks: null, recipe: null, image: null };
let upload = { bytes: 0, pixels: 0 };
let turn = 0; // of several questions under way, the last one's answer is shown

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "width%") made.style.width = percent(value, 1);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// -- asking

async function ask(address, options) {
  let answer, data;
  try {
    answer = await fetch(address, options);
    data = await answer.json();
  } catch {
    throw new Error("The server does not answer. Is `unstride studio` still running?");
  }
  if (!answer.ok) throw new Error(data.error || `The server answered ${answer.status}.`);
  return data;
}

async function busy(work) {
  const own = ++turn, begun = Date.now();
  const say = (text) => { if (own === turn) at("status").textContent = text; };
  fail("");
  say("Computing.");
  document.body.classList.add("busy");
  try {
    await work(() => own === turn);
    say(`Done in ${((Date.now() - begun) / 1000).toFixed(1)} s.`);
  } catch (error) {
    say("");
    if (own === turn) fail(error.message);
  } finally {
    if (own === turn) document.body.classList.remove("busy");
  }
}

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

// -- choosing

const address = () => `#${new URLSearchParams(Object.entries(chosen).filter(([, value]) => value !== null))}`;

function options(select, entries, value) {
  select.replaceChildren(...entries.map(({ key, title }) => element("option", { value: key }, title)));
  select.value = value;
}

// The recipes and images of the chosen networks.
async function offer() {
  const found = await ask(`/api/offer?networks=${encodeURIComponent(chosen.networks)}`);
  if (!found.recipes.some(({ key }) => key === chosen.recipe)) chosen.recipe = found.recipes[0].key;
  const own = chosen.image !== null && chosen.image.startsWith("upload-");
  if (!own && !found.images.some(({ key }) => key === chosen.image)) chosen.image = found.images.length ? found.images[0].key : null;
  options(at("recipe"), found.recipes, chosen.recipe);
  at("images").replaceChildren(...found.images.map(({ key, title, data }) => element("label", { title },
    element("input", { type: "radio", name: "image", value: key, checked: key === chosen.image }),
    element("img", { src: data, alt: title }))));
}

const explain = (fresh) => busy(async (current) => {
  if (fresh) await offer();
  if (!current()) return;
  at("networks").value = chosen.networks;
  at("recipe").value = chosen.recipe;
  for (const input of document.querySelectorAll("input[name=image]")) input.checked = input.value === chosen.image;
  const label = document.querySelector("label:has(input[name=image]:checked)"), box = at("images");
  if (label && label.offsetLeft + label.offsetWidth > box.scrollLeft + box.clientWidth) box.scrollLeft = label.offsetLeft;
  history.replaceState(null, "", address());
  if (chosen.image === null) throw new Error("There is no image for these networks. Choose your own.");
  const data = await ask(`/api/explain?${new URLSearchParams(chosen)}`, { method: "POST", body: "" });
  if (current()) show(data);
});

const send = (file) => file && busy(async (current) => {
  if (file.size > upload.bytes) throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MB; at most ${upload.bytes >> 20} MB are allowed here.`);
  const query = new URLSearchParams({ networks: chosen.networks, recipe: chosen.recipe });
  const data = await ask(`/api/explain?${query}`, { method: "POST", body: file });
  if (!current()) return;
  chosen.image = data.image;
  for (const input of document.querySelectorAll("input[name=image]")) input.checked = false;
  history.replaceState(null, "", address());
  show(data);
});

function read() {
  const link = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(chosen)) if (link.has(name)) chosen[name] = link.get(name);
}

// -- showing

// Right or wrong in words, for those who do not see the colour.
const mark = (right) => (right === null ? null : element("span", { class: right ? "mark right" : "mark wrong" }, right ? " ✓ right" : " ✗ wrong"));
const answered = ({ text, right }) => [text, mark(right)];

function show(data) {
  at("headline").textContent = data.headline;
  at("recipe-text").textContent = data.recipe;
  at("link").href = address();
  const facts = [["Base model", ...answered(data.base)], ["Recipe", ...answered(data.answer)], ["Cost", times(data.cost), element("span", { class: "note" }, `1.00x is one forward pass of ${data.base_network}`)],
    ["Agreement of the passes", percent(data.agreement)], ["Why it stopped", data.stopped]];
  if (data.truth !== null) facts.splice(2, 0, ["Label", data.truth]);
  at("facts").replaceChildren(...facts.map(([name, ...value]) => element("div", { "data-of": name }, element("dt", {}, name), element("dd", {}, ...value))));
  at("maps").replaceChildren(...data.images.map(({ caption, data: src }) => element("figure", {}, element("img", { src, alt: caption }), element("figcaption", {}, caption))));
  at("stages").replaceChildren(...data.stages.flatMap((stage, k) => [gate(stage), section(stage, k)]));
  scores(data.scores);
  at("result").hidden = false;
}

function gate({ condition, gate: found }) {
  if (condition === null) return "";
  const text = found === null ? `${condition}: not reached` : found.text;
  const place = found === null || found.below === null ? null : element("div", { class: "meter", "aria-hidden": "true" },
    element("i", { "width%": Math.min(1, Math.max(0, found.value)) }), element("u", { "width%": found.below }));
  return element("div", { class: `gate ${found === null ? "off" : found.passed ? "passed" : "stopped"}` },
    element("p", {}, element("b", {}, "Gate: "), text), place);
}

function section(stage, k) {
  const title = `Stage ${k + 1}: ${stage.title}`;
  const head = element("h4", {}, title, element("span", { class: "soft" }, ` · ${stage.network}`));
  if (!stage.reached) return element("section", { class: "stage off" }, head, element("p", {}, "Not run: it costs nothing."));
  const maps = stage.passes.some((one) => one.map);
  const names = [maps ? "Its map" : "The network sees", "Pass", "Its own answer", "Weight", "Cost", "Answer so far"];
  const table = element("table", { class: "passes" },
    element("caption", { class: "hidden" }, title),
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...stage.passes.map(row)));
  return element("section", { class: "stage" }, head,
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table),
    element("p", { class: "soft" }, `Cost so far: ${times(stage.spent)}`));
}

function row(one) {
  const name = one.view + (one.state ? ` in ${one.state}` : "");
  const image = element("img", { src: one.map || one.seen, alt: `${one.size} pixels, ${one.map ? "map of this pass" : name}` });
  return element("tr", {}, element("td", {}, image), element("th", { scope: "row" }, name, element("span", { class: "soft" }, one.network)),
    element("td", { class: "own" }, ...answered(one)), element("td", {}, percent(one.weight)), element("td", {}, times(one.cost)),
    element("td", {}, ...answered(one.running)));
}

function scores(list) {
  const top = Math.max(...list.flatMap(({ base, answer }) => [Math.abs(base), Math.abs(answer)]), 1e-9);
  const bar = (value, kind, name) => element("td", {}, element("div", { class: `bar ${name}`, "aria-hidden": "true" }, element("i", { "width%": Math.abs(value) / top })),
    kind === "value" ? value.toPrecision(4) : percent(value, 1));
  const head = ["", "Base model", "Recipe"].map((name) => element(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  at("scores").replaceChildren(element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...list.map(({ name, base, answer, kind }) => element("tr", { "data-name": name },
      element("th", { scope: "row" }, name), bar(base, kind, "base"), bar(answer, kind, "answer")))));
}

// -- begin

at("networks").addEventListener("change", (event) => { chosen.networks = event.target.value; chosen.recipe = chosen.image = null; explain(true); });
at("recipe").addEventListener("change", (event) => { chosen.recipe = event.target.value; explain(false); });
at("images").addEventListener("change", (event) => { chosen.image = event.target.value; explain(false); });
at("file").addEventListener("change", (event) => { send(event.target.files[0]); event.target.value = ""; });
document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") send(event.dataTransfer.files[0]);
  });
}
window.addEventListener("hashchange", () => { read(); explain(true); });

try {
  const catalogue = await ask("/api/networks");
  upload = catalogue.upload;
  at("limits").textContent = `It stays on this machine. At most ${upload.bytes >> 20} MB and ${upload.pixels / 1e6} million pixels.`;
  chosen.networks = catalogue.networks[0].key;
  read();
  options(at("networks"), catalogue.networks, chosen.networks);
  await explain(true);
} catch (error) {
  fail(error.message);
}
