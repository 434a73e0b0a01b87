// The page: what was picked, one question to the server per picture, and a slider that needs no server at all.

import * as draw from "./draw.js";

const at = (id) => document.getElementById(id);
const now = { catalogue: null, model: null, picture: null, data: null, pictures: null, budget: 10, turn: 0, timer: null };

async function ask(address, options) {
  let answer, data;
  try {
    answer = await fetch(address, options);
    data = await answer.json();
  } catch {
    throw new Error("the server does not answer: is `unstride studio` still running?");
  }
  if (!answer.ok) throw new Error(data.error || `the server answered ${answer.status}`);
  return data;
}

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

// -- choosing

function models() {
  at("model").replaceChildren(...now.catalogue.models.map((m) => draw.element("option", { value: m.key }, `${m.spec} · ${m.about}`)));
  const { bytes, pixels } = now.catalogue.upload;
  at("limits").textContent = `It stays on this machine. Up to ${bytes >> 20} MB and ${pixels / 1e6} million pixels.`;
}

function samples() {
  at("samples").replaceChildren(...now.model.samples.map((sample) => {
    const image = draw.element("img", { src: sample.data, alt: sample.title });
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
    const button = draw.element("button", { type: "button", title: sample.title, "aria-pressed": "false", "data-key": sample.key }, image);
    button.addEventListener("click", () => look({ sample: sample.key }));
    return button;
  }));
}

async function pick(key) {
  now.model = now.catalogue.models.find((m) => m.key === key);
  samples();
  at("layers").hidden = true;
  if (now.picture && now.picture.file) await look(now.picture);
  else if (now.model.samples.length) await look({ sample: now.model.samples[0].key });
  else await only(() => ask(`/api/layers?model=${now.model.key}`), report);
}

function upload(file) {
  if (!file) return;
  const { bytes } = now.catalogue.upload;
  if (file.size > bytes) return fail(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MB; at most ${bytes >> 20} MB are allowed here`);
  look({ file });
}

// -- asking

async function look(picture) {
  now.picture = picture;
  for (const button of at("samples").children) button.setAttribute("aria-pressed", String(button.dataset.key === picture.sample));
  const chosen = "file" in picture ? "" : `&sample=${encodeURIComponent(picture.sample)}`;
  await only(() => ask(`/api/look?model=${now.model.key}${chosen}`, { method: "POST", body: picture.file || "" }), show);
}

// Of several questions under way, the last one's answer is shown.
async function only(question, answered) {
  const turn = ++now.turn, begun = Date.now();
  stop();
  fail("");
  document.body.classList.add("busy");
  const tell = () => { at("status").textContent = `${now.model.spec} is looking… ${Math.round((Date.now() - begun) / 1000)} s`; };
  const clock = setInterval(tell, 1000);
  at("status").textContent = `${now.model.spec} is looking…`;
  let done = "";
  try {
    const data = await question();
    if (turn === now.turn) await answered(data);
    done = `Looked in ${((Date.now() - begun) / 1000).toFixed(1)} s.`;
  } catch (error) {
    if (turn === now.turn) fail(error.message);
  } finally {
    clearInterval(clock);
    if (turn === now.turn) {
      at("status").textContent = done;
      document.body.classList.remove("busy");
    }
  }
}

// -- showing

function report(data) {
  draw.layers(at("layer-rows"), at("layers-note"), at("left-out"), data);
  at("layers").hidden = false;
}

async function show(data) {
  const photo = new Image();
  photo.src = data.image.data;
  await photo.decode();
  now.data = data;
  at("result").hidden = false;
  const classes = data.task === "classification";
  at("bars-title").textContent = classes ? "Plain against enhanced: probability" : "Plain against enhanced: share of the pixels";
  at("strip-part").hidden = !classes;
  const place = at(classes ? "pictures" : "pictures-wide"); // five pictures want the whole width
  at(classes ? "pictures-wide" : "pictures").replaceChildren();
  now.pictures = new draw.Pictures(place, data, photo);
  at("tree-note").textContent = "Best first: the most confident state is changed at its next searched layer (L). Larger dots are more confident; the newest are shaded.";
  const slider = at("budget");
  slider.max = data.states.length;
  slider.value = Math.min(now.budget, data.states.length);
  report(data.layers);
  move();
}

function move() {
  const data = now.data;
  if (!data) return;
  const budget = Number(at("budget").value), k = budget - 1;
  const states = budget === 1 ? "1 state (plain)" : `${budget} states`;
  at("states").textContent = states;
  at("budget").setAttribute("aria-valuetext", `${states}, ${data.cost[k].toFixed(1)} times a plain forward`);
  at("headline").textContent = headline(data, k);
  const facts = [
    [`${data.cost[k].toFixed(1)}x`, "cost: MACs of a plain forward"],
    [draw.percent(data.agreement[k]), "agreement of the states"],
    [data.spread[k].toFixed(3), "spread, nats"],
    [`${budget} of ${data.layers.states.toLocaleString("en")}`, "states looked at"],
  ];
  at("facts").replaceChildren(...facts.map(([value, name]) => draw.element("div", {}, draw.element("b", {}, value), draw.element("span", {}, name))));
  draw.tree(at("tree"), data, budget);
  draw.bars(at("bars"), data, budget);
  if (data.task === "classification") draw.strip(at("strip"), data, budget);
  draw.cost(at("cost"), data, budget);
  now.pictures.draw(budget);
}

function headline(data, k) {
  if (data.task !== "classification") return k === 0 ? "The plain answer" : `${draw.percent(data.changed[k], 1)} of the pixels change`;
  const best = (values) => values.indexOf(Math.max(...values));
  const [p, e] = [best(data.plain), best(data.enhanced[k])];
  const [before, after] = [draw.percent(data.plain[p]), draw.percent(data.enhanced[k][e])];
  if (k === 0) return `${data.classes[p].name}, ${before}`;
  if (p === e) return `${data.classes[p].name}, ${before} plain, ${after} enhanced`;
  return `${data.classes[p].name} ${before} becomes ${data.classes[e].name} ${after}`;
}

// -- playing

function stop() {
  clearInterval(now.timer);
  now.timer = null;
  at("play").textContent = "Play";
  at("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (now.timer) return stop();
  const slider = at("budget");
  if (slider.value === slider.max) slider.value = 1;
  at("play").textContent = "Pause";
  at("play").setAttribute("aria-pressed", "true");
  move();
  now.timer = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    now.budget = Number(slider.value);
    move();
    if (slider.value === slider.max) stop();
  }, 450);
}

// -- begin

at("model").addEventListener("change", (event) => pick(event.target.value));
at("file").addEventListener("change", (event) => { upload(event.target.files[0]); event.target.value = ""; });
at("budget").addEventListener("input", (event) => { stop(); now.budget = Number(event.target.value); move(); });
at("play").addEventListener("click", play);
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") upload([...event.dataTransfer.files][0]);
  });
}
let resized;
window.addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(move); });

try {
  now.catalogue = await ask("/api/models");
  models();
  await pick(now.catalogue.models[0].key);
} catch (error) {
  fail(error.message);
}
