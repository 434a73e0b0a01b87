// Tuning on the sample: begun on the server, asked for now and then, shown as the frontier it found.

import { element } from "./draw.js";

const at = (id) => document.getElementById(id);
const EVERY = 700; // ms

export async function tune(ask, model, found) {
  const address = `/api/tune?model=${model}`;
  at("tune").disabled = true;
  at("tuning").hidden = false;
  try {
    let told = await ask(address, { method: "POST" });
    while (told.state === "running") {
      show(told);
      await new Promise((done) => setTimeout(done, EVERY));
      told = await ask(address);
    }
    if (told.state === "failed") throw new Error(told.error);
    show(told);
    await found();
  } finally {
    at("tune").disabled = false;
  }
}

export function show(told) {
  const running = told.state === "running", done = told.state === "done";
  at("tuning").hidden = !running && !done;
  at("tuning-bar").hidden = done;
  at("tuning-bar").value = running ? told.seen / told.images : 1;
  if (running) at("tuning-says").textContent = told.seen < told.images
    ? `Tuning: ${told.seen} of ${told.images} labelled images looked at in every way, ${told.seconds.toFixed(0)} s`
    : `Tuning: choosing the best recipe for each cost, ${told.seconds.toFixed(0)} s`;
  at("tuned-recipe").textContent = done ? told.recipe : "";
  at("frontier").replaceChildren();
  if (!done) return;
  at("tuning-says").textContent = `Tuned on ${told.images} images, for at most ${told.cost}x the cost of plain; each row is judged on images that its choice did not see. ${told.verdict[0].toUpperCase()}${told.verdict.slice(1)}.`;
  const [head, ...rows] = told.table;
  at("frontier").append(
    element("thead", {}, element("tr", {}, ...head.map((cell) => element("th", {}, cell)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell))))));
}
