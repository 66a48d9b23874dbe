// Keeps the page of `thresher watch` up to date: asks for the run's state, and where there is a newer page puts it in the
// place of the old one. The section that is read stays where it is on the screen, and what was unfolded stays so. Nothing
// of the run is computed here: rates, the time left and the sentence of /state are watch.py's.
"use strict";
const EVERY = 3000; // ms
let shown = null;

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: status ${answer.status}`);
  return answer;
}

async function bringIn() {
  const text = await (await ask("/")).text();
  const next = new DOMParser().parseFromString(text, "text/html"), main = next.querySelector("main");
  if (!main) throw new Error("/: not the run's page"); // checked before anything of the shown page is changed
  // Pictures first, or the page would jump while they are read.
  await Promise.all([...next.querySelectorAll("main img")].map((image) => {
    image.removeAttribute("loading");
    const ahead = new Image();
    ahead.src = image.getAttribute("src");
    return ahead.decode().catch(() => {});
  }));
  const unfolded = [...document.querySelectorAll("main details")].map((details) => details.open);
  const sections = () => [...document.querySelectorAll("main h2")];
  const top = (section) => section.getBoundingClientRect().top;
  const read = sections().filter((section) => top(section) < innerHeight / 2).pop();
  const [name, place, y] = [read?.textContent, read && top(read), scrollY];
  document.title = next.title;
  document.querySelector("main").replaceWith(document.adoptNode(main));
  document.querySelectorAll("main details").forEach((details, number) => { details.open = unfolded[number] ?? false; });
  scrollTo(0, y);
  const same = sections().find((section) => section.textContent === name);
  if (y > 0 && same) scrollBy(0, top(same) - place);
}

async function look() {
  const foot = document.getElementById("watch");
  try {
    const state = await (await ask("/state")).json();
    if (shown !== null && state.version !== shown) await bringIn();
    shown = state.version;
    foot.textContent = state.says;
  } catch {
    foot.textContent = "no answer from thresher watch: this page shows what it sent last";
  }
  setTimeout(look, document.hidden ? 4 * EVERY : EVERY);
}
look();
