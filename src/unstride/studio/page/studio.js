// The page: what was picked is in the address, so that a link tells the same story again; one question to the server per
// story, and a slider that needs no server at all.

import * as draw from "./draw.js";
import * as telling from "./story.js";
import { show as showTuning, tune } from "./tuning.js";

const at = (id) => document.getElementById(id);
const now = { catalogue: null, model: null, recipe: null, image: null, data: null, images: null, turn: 0, timer: null };

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

// -- what is picked: #model=sample&recipe=default&image=3, and for a search &states=10

function asked() {
  const link = new URLSearchParams(location.hash.slice(1));
  return { model: link.get("model"), recipe: link.get("recipe"), image: link.get("image"), states: Number(link.get("states")) || null };
}

function linked(states = null) {
  const parts = { model: now.model.spec, recipe: now.recipe, ...(now.image === null ? {} : { image: now.image }), ...(states ? { states } : {}) };
  return `#${new URLSearchParams(parts)}`;
}

// Another entry in the browser's history, so that back works.
function go(changes) {
  Object.assign(now, changes);
  history.pushState(null, "", linked());
  return follow();
}

// From the address to the story it names.
async function follow() {
  const want = asked(), models = now.catalogue.models;
  const model = want.model === null ? models[0] : models.find((m) => m.spec === want.model);
  if (!model) return refuse(`the model "${want.model}" of this link is not offered here: start unstride studio with it`);
  const recipe = want.recipe === null ? model.recipes[0].key : want.recipe;
  const image = want.image === null && model.samples.length ? model.samples[0].key : want.image;
  Object.assign(now, { model, recipe, image });
  pickers();
  if (!model.recipes.some((r) => r.key === recipe)) return refuse(`the recipe "${recipe}" of this link is not here${recipe === "tuned" ? ": tune on the sample first" : ""}`);
  history.replaceState(null, "", linked(want.states));
  if (image === null) return only(() => ask(`/api/layers?model=${model.key}`), report);
  return only(() => ask(`/api/look?${question()}&sample=${encodeURIComponent(image)}`, { method: "POST", body: "" }), (data) => show(data, want.states));
}

function refuse(message) {
  now.turn++; // what is still being computed is not wanted any more
  document.body.classList.remove("busy");
  at("status").textContent = "";
  fail(message);
}

const question = () => `model=${now.model.key}&recipe=${encodeURIComponent(now.recipe)}`;

// -- choosing

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => draw.element("option", { value }, text)));
  select.value = chosen;
}

function pickers() {
  options(at("model"), now.catalogue.models.map((m) => [m.key, `${m.spec} · ${m.about}`]), now.model.key);
  options(at("recipe"), now.model.recipes.map((r) => [r.key, r.title]), now.recipe);
  at("tune").hidden = !now.model.tunes;
  at("tuning").hidden = !now.model.tunes || !at("tuning-says").textContent;
  const { bytes, pixels } = now.catalogue.upload;
  at("limits").textContent = `It stays on this machine. Up to ${bytes >> 20} MB and ${pixels / 1e6} million pixels.`;
  if (at("samples").dataset.model !== now.model.key) samples();
  for (const button of at("samples").children) button.setAttribute("aria-pressed", String(button.dataset.key === now.image));
}

function samples() {
  at("samples").dataset.model = now.model.key;
  at("layers").hidden = true;
  at("samples").replaceChildren(...now.model.samples.map((sample) => {
    const image = draw.element("img", { src: sample.data, alt: sample.title });
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
    const button = draw.element("button", { type: "button", title: sample.title, "aria-pressed": "false", "data-key": sample.key }, image);
    button.addEventListener("click", () => go({ image: sample.key }));
    return button;
  }));
}

// Another model: an own photograph stays, a sample of another model does not, nor a recipe that this one has not.
function pick(key) {
  const model = now.catalogue.models.find((m) => m.key === key), own = now.image && now.image.startsWith("upload-");
  const recipe = model.recipes.some((r) => r.key === now.recipe) ? now.recipe : model.recipes[0].key;
  return go({ model, recipe, image: own ? now.image : model.samples.length ? model.samples[0].key : null });
}

async function upload(file) {
  if (!file) return;
  const { bytes } = now.catalogue.upload;
  if (file.size > bytes) return fail(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MB; at most ${bytes >> 20} MB are allowed here`);
  await only(() => ask(`/api/look?${question()}`, { method: "POST", body: file }), (data) => {
    now.image = data.image;
    history.pushState(null, "", linked());
    pickers();
    return show(data, null);
  });
}

async function tuning() {
  fail("");
  try {
    await tune(ask, now.catalogue.models.find((m) => m.tunes).key, async () => {
      now.catalogue = await ask("/api/models");
      now.model = now.catalogue.models.find((m) => m.key === now.model.key);
      pickers();
    });
  } catch (error) {
    fail(error.message);
  }
}

// -- asking

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

async function show(data, states) {
  at("drawn").hidden = !data.figure;
  if (data.figure) return hang(data);
  at("columns").hidden = at("images-wide").hidden = at("answers").hidden = false;
  const photo = new Image();
  photo.src = data.image.data;
  await photo.decode();
  now.data = data;
  at("result").hidden = false;
  const classes = data.task === "classification", search = data.story === null;
  at("bars-title").textContent = classes ? "Plain against enhanced: probability" : "Plain against enhanced: share of the pixels";
  at("recipe-says").textContent = said(data);
  // A story's stages show what was seen and spent; a search shows it for every budget.
  at("slider").hidden = at("tree-part").hidden = at("cost-part").hidden = !search;
  at("columns").classList.toggle("told", !search);
  at("strip-part").hidden = !classes || !search;
  const place = at(classes ? "images" : "images-wide"); // five images want the whole width
  at(classes ? "images-wide" : "images").replaceChildren();
  now.images = new draw.Images(place, data, photo);
  at("images").hidden = !search;
  at("story").replaceChildren();
  if (!search) telling.story(at("story"), data);
  const slider = at("budget"), all = data.states.length;
  slider.max = all;
  slider.value = search ? Math.min(states || data.budget, all) : all;
  report(data.layers);
  move();
}

// A task without classes is one image, drawn by the server.
async function hang(data) {
  now.data = null; // nothing moves
  for (const part of ["slider", "columns", "images-wide", "answers"]) at(part).hidden = true;
  at("story").replaceChildren();
  Object.assign(at("drawn"), { src: data.figure, alt: `${data.task}: ${data.headline}` });
  await at("drawn").decode();
  at("headline").textContent = data.headline;
  at("recipe-says").textContent = said(data);
  at("link").href = linked();
  facts(data.facts);
  at("result").hidden = false;
  report(data.layers);
}

const said = (data) => data.recipe.split("\n").map((line) => line.trim()).join(" · ");

function facts(told) {
  at("facts").replaceChildren(...told.map(([value, name]) => draw.element("div", {}, draw.element("b", {}, value), draw.element("span", {}, name))));
}

function move() {
  const data = now.data;
  if (!data) return;
  const budget = Number(at("budget").value), k = budget - 1, search = data.story === null;
  const states = budget === 1 ? "1 state (plain)" : `${budget} states`;
  at("states").textContent = states;
  at("budget").setAttribute("aria-valuetext", `${states}, ${data.cost[k].toFixed(1)} times a plain forward`);
  at("headline").textContent = headline(data, k);
  at("link").href = linked(search ? budget : null);
  telling.answers(at("answers"), data, k, `with ${now.recipe}`);
  facts([
    [`${data.cost[k].toFixed(1)}x`, "cost: MACs of a plain forward"],
    [draw.percent(data.agreement[k]), search ? "agreement of the states" : "agreement of the looks"],
    [data.spread[k].toFixed(3), "spread, nats"],
    search ? [`${budget} of ${data.layers.states.toLocaleString("en")}`, "states looked at"] : [data.stopped, "why it ended"],
  ]);
  draw.bars(at("bars"), data, budget);
  if (search) {
    draw.tree(at("tree"), data, budget);
    draw.cost(at("cost"), data, budget);
    if (data.task === "classification") draw.strip(at("strip"), data, budget);
  }
  now.images.draw(budget);
}

// The slider is part of the link, but not of the history: back goes to another story.
function slid() {
  history.replaceState(null, "", linked(Number(at("budget").value)));
  move();
}

function headline(data, k) {
  if (data.task !== "classification") return k === 0 ? "The plain answer" : `${draw.percent(data.changed[k], 1)} of the pixels change`;
  const best = (values) => values.indexOf(Math.max(...values));
  const [p, e] = [best(data.plain), best(data.enhanced[k])];
  const [before, after] = [draw.percent(data.plain[p]), draw.percent(data.enhanced[k][e])];
  if (k === 0 && before === after) return `${data.classes[p].name}, ${before}`;
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
    slid();
    if (slider.value === slider.max) stop();
  }, 450);
}

// -- begin

at("model").addEventListener("change", (event) => pick(event.target.value));
at("file").addEventListener("change", (event) => { upload(event.target.files[0]); event.target.value = ""; });
at("recipe").addEventListener("change", (event) => go({ recipe: event.target.value }));
at("tune").addEventListener("click", tuning);
at("budget").addEventListener("input", () => { stop(); slid(); });
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

window.addEventListener("hashchange", follow);

try {
  now.catalogue = await ask("/api/models");
  const tunes = now.catalogue.models.find((m) => m.tunes);
  const told = tunes ? await ask(`/api/tune?model=${tunes.key}`) : null;
  if (told) showTuning(told);
  await follow();
  if (told && told.state === "running") await tuning(); // begun before this page was opened
} catch (error) {
  fail(error.message);
}
