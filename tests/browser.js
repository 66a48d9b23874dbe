"use strict";
// Runs a page's scripts in node over a small stand-in for a browser's DOM, and then a test's scenario on the page.
//
//   stdin    {"html": the page, "hash": of its address, "scripts": [more scripts], "answers": {path: [answers]}, "scenario": JavaScript}
//   stdout   what the scenario returns, as JSON
//
// The stand-in has what the pages use and no layout: every length is 0. What it lacks is an error, not undefined silently
// read: an unknown selector throws. A scenario sees the page's globals and press, click, fire, texts, tick.
const vm = require("node:vm");
const VOID = new Set(["META", "IMG", "BR", "WBR", "INPUT", "LINK", "HR"]);
const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', "#34": '"', "#39": "'" };
const decoded = (text) => text.replace(/&(#?\w+);/g, (whole, name) => ENTITIES[name] ?? whole);
const log = { scrolled: [], highlighted: [], reloads: 0, address: null };

class Listening {
  constructor() { this.listeners = []; }
  addEventListener(type, listener) { this.listeners.push([type, listener]); }
}
class Node extends Listening {
  constructor() { super(); this.parentNode = null; this.childNodes = []; }
  get parentElement() { return this.parentNode; }
  get firstChild() { return this.childNodes[0] ?? null; }
  get textContent() { return this.childNodes.map((child) => child.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...(text === "" ? [] : [text])); }
  *within() { for (const child of this.childNodes) { yield child; yield* child.within(); } }
  *elements() { for (const node of this.within()) if (node instanceof Element) yield node; }
  remove() { if (this.parentNode) this.parentNode.childNodes = this.parentNode.childNodes.filter((child) => child !== this); this.parentNode = null; }
  insert(place, nodes) {
    const made = nodes.map((node) => (node instanceof Node ? node : new Text(String(node))));
    for (const node of made) { node.remove(); node.parentNode = this; }
    this.childNodes.splice(place, 0, ...made);
  }
  append(...nodes) { this.insert(this.childNodes.length, nodes); }
  prepend(...nodes) { this.insert(0, nodes); }
  replaceChildren(...nodes) { for (const child of [...this.childNodes]) child.remove(); this.append(...nodes); }
  replaceWith(...nodes) { const { parentNode: parent } = this, place = parent.childNodes.indexOf(this); this.remove(); parent.insert(place, nodes); }
  querySelectorAll(selector) { const test = selecting(selector); return [...this.elements()].filter(test); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
}
class Text extends Node {
  constructor(data) { super(); this.data = data; }
  get textContent() { return this.data; }
  get length() { return this.data.length; }
}
class Element extends Node {
  constructor(tag) {
    super();
    Object.assign(this, { tagName: tag.toUpperCase(), attributes: new Map(), style: {}, value: "", scrollLeft: 0, offsetLeft: 0, offsetWidth: 0, clientWidth: 0 });
    this.dataset = new Proxy({}, { get: (_, name) => this.getAttribute(`data-${name}`) ?? undefined });
    const names = () => (this.getAttribute("class") ?? "").split(/\s+/).filter(Boolean);
    this.classList = {
      contains: (name) => names().includes(name),
      toggle: (name, on) => this.setAttribute("class", [...names().filter((other) => other !== name), ...(on ?? !names().includes(name) ? [name] : [])].join(" ")),
      add: (name) => this.classList.toggle(name, true),
      remove: (name) => this.classList.toggle(name, false),
    };
    if (this.tagName === "CANVAS") this.filled = [];
  }
  get id() { return this.getAttribute("id") ?? ""; }
  setAttribute(name, text) { this.attributes.set(name, String(text)); }
  getAttribute(name) { return this.attributes.get(name) ?? null; }
  removeAttribute(name) { this.attributes.delete(name); }
  closest(selector) { const test = selecting(selector); for (let node = this; node instanceof Element; node = node.parentNode) if (test(node)) return node; return null; }
  getBoundingClientRect() { return { top: this.top ?? 0 }; }
  scrollIntoView() { log.scrolled.push(this); }
  getContext() { this.filled = []; const context = { fillRect: (x) => { this.filled[x] = context.fillStyle; } }; return context; }
  showModal() { this.open = true; }
  focus() { world.document.activeElement = this; }
  blur() { world.document.activeElement = world.document.body; }
  select() {}
}
for (const name of ["hidden", "open"]) Object.defineProperty(Element.prototype, name, {
  get() { return this.attributes.has(name); },
  set(on) { if (on) this.setAttribute(name, ""); else this.removeAttribute(name); },
});
Object.defineProperty(Element.prototype, "title", { get() { return this.getAttribute("title") ?? ""; }, set(text) { this.setAttribute("title", text); } });

const PART = /^(?:#([\w-]+)|\.([\w-]+)|\[([\w-]+)(?:="([^"]*)")?\]|:not\(([^()]+)\)|([\w-]+))/;
function compound(text) { // of one element, such as span[data-at]:not([data-b])
  const tests = [];
  for (let rest = text; rest;) {
    const found = PART.exec(rest);
    if (!found) throw new Error(`the stand-in cannot read the selector ${text}`);
    const [whole, id, kind, attribute, equal, not, tag] = found, other = not && compound(not);
    if (id) tests.push((node) => node.id === id);
    else if (kind) tests.push((node) => node.classList.contains(kind));
    else if (attribute) tests.push((node) => node.attributes.has(attribute) && (equal === undefined || node.getAttribute(attribute) === equal));
    else if (not) tests.push((node) => !other(node));
    else tests.push((node) => node.tagName === tag.toUpperCase());
    rest = rest.slice(whole.length);
  }
  return (node) => tests.every((test) => test(node));
}
function selecting(selector) {
  const [last, ...above] = selector.trim().split(/\s+/).map(compound).reverse();
  return (node) => {
    if (!last(node)) return false;
    let at = node.parentNode;
    return above.every((test) => {
      while (at instanceof Element && !test(at)) at = at.parentNode;
      const found = at instanceof Element;
      at = at && at.parentNode;
      return found;
    });
  };
}
function parse(html) { // what is open at the end is closed there, as browsers do
  const document = new Node(), token = /<!--[^]*?-->|<!doctype[^>]*>|<\/([\w-]+)\s*>|<([\w-]+)((?:"[^"]*"|[^">])*)>|[^<]+|</giy;
  let open = document, found;
  while ((found = token.exec(html))) {
    const [whole, closed, tag, attributes] = found;
    if (closed) {
      let node = open;
      while (node !== document && node.tagName !== closed.toUpperCase()) node = node.parentNode;
      if (node !== document) open = node.parentNode;
    } else if (tag) {
      const node = new Element(tag);
      for (const [, name, quoted, bare] of attributes.matchAll(/([\w:-]+)(?:="([^"]*)"|=([^\s">]+))?/g)) node.setAttribute(name, decoded(quoted ?? bare ?? ""));
      open.append(node);
      if (/^(script|style|noscript)$/i.test(tag)) { // their text ends at their own end tag alone
        const end = html.toLowerCase().indexOf(`</${tag.toLowerCase()}`, token.lastIndex), stop = end < 0 ? html.length : end;
        node.append(html.slice(token.lastIndex, stop));
        token.lastIndex = stop;
      }
      if (!VOID.has(node.tagName)) open = node;
    } else if (!whole.startsWith("<!")) open.append(decoded(whole));
  }
  const only = (tag) => document.querySelector(tag);
  return Object.assign(document, {
    documentElement: only("html"), body: only("body"), activeElement: only("body"), title: only("title")?.textContent ?? "", hidden: false,
    getElementById: (id) => document.querySelector(`#${id}`),
    createElement: (tag) => new Element(tag),
    adoptNode: (node) => { node.remove(); return node; },
    createRange: () => ({ setStart(node, at) { this.startContainer = node; this.start = at; }, setEnd(node, at) { this.end = [node, at]; } }),
    createTreeWalker: (node) => { const texts = [...node.within()].filter((child) => child instanceof Text); return { nextNode: () => texts.shift() ?? null }; },
  });
}

// A server: an answer is {status, text}, {error} for no connection, or {cut} for a body that ends before its length.
const asked = [];
async function fetch(path) {
  asked.push(path);
  const next = world.answers[path]?.shift();
  if (!next || next.error) throw new TypeError("Failed to fetch");
  const { status = 200, text = "", cut } = next;
  const body = async () => { if (cut) throw new TypeError("network error"); return text; };
  return { ok: status >= 200 && status < 300, status, text: body, json: async () => JSON.parse(await body()) };
}

const given = JSON.parse(require("node:fs").readFileSync(0, "utf8")), timers = [], onWindow = new Listening();
const world = {
  document: parse(given.html), answers: given.answers ?? {}, fetch, atob, URLSearchParams, Element, Text,
  innerWidth: 1200, innerHeight: 800, scrollY: 0, location: { hash: given.hash ?? "", reload: () => { log.reloads++; } },
  history: { replaceState: (state, title, address) => { log.address = address; } },
  NodeFilter: { SHOW_TEXT: 4 }, DOMParser: class { parseFromString(text) { return parse(text); } },
  Image: class { async decode() {} },
  matchMedia: () => new Listening(), getComputedStyle: () => ({ getPropertyValue: (name) => ` 1 2 ${name.length}` }),
  CSS: { highlights: { delete() {}, set: (name, range) => log.highlighted.push(range) } }, Highlight: class { constructor(range) { return range; } },
  scrollTo: (...to) => log.scrolled.push(to), scrollBy: (...by) => log.scrolled.push(by),
  setTimeout: (what, ms) => timers.push([what, ms]), addEventListener: (type, listener) => onWindow.addEventListener(type, listener),
};
world.window = world;
vm.createContext(world);

// What a scenario acts with.
function fire(type, target, about = {}) {
  const event = { type, target, preventDefault() {}, ...about };
  for (let node = target; ; node = node.parentNode) {
    for (const [name, listener] of (node ?? onWindow).listeners) if (name === type) listener(event);
    if (!node) return;
  }
}
const acts = {
  log, asked, fire,
  click: (node, about) => fire("click", node, about),
  press: (key) => fire("keydown", world.document.activeElement, { key }),
  texts: (selector, from = world.document) => from.querySelectorAll(selector).map((node) => node.textContent),
  async tick() { const [what, ms] = timers.shift(); await what(); return ms; }, // runs the oldest timer; its delay
  settle: () => new Promise((done) => setImmediate(done)),
};
(async () => {
  const inline = world.document.querySelectorAll("script").filter((node) => !node.getAttribute("src") && !node.getAttribute("type"));
  for (const source of [...inline.map((node) => node.textContent), ...(given.scripts ?? [])]) vm.runInContext(source, world);
  await acts.settle();
  const result = await vm.runInContext(`(async ({ ${Object.keys(acts)} }) => { ${given.scenario} })`, world)(acts);
  process.stdout.write(JSON.stringify(result));
})().catch((error) => { process.stderr.write(`${error.stack}\n`); process.exitCode = 1; });
