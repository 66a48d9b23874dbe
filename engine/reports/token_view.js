(() => {
const { ratioOf, estimators, updated, probability, gradientOf, staleness, spread, mean, percent, longest, fullScale, opacity, halves } = FORMULAS; // token_formulas.js
const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent), O = D.objective, groups = D.groups;
const UNIT = D.words ? "word" : "token"; // words: the text is not cut into tokens

// Small tools. Sampled text only ever becomes a text node.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function fmt(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("-", "−").replace("e+", "e").replace("e-", "e−");
  return String(+value.toPrecision(3)).replace("-", "−");
}
const signed = (value) => (value > 0 ? "+" : "") + fmt(value);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : word.endsWith("ch") ? "es" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const repr = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");

// A sample's tokens: its own, then those of its trained branches.
const turnsOf = (sample) => [sample.segments, ...(sample.branches || []).filter(([, , trained]) => trained).map(([, segments]) => segments)]
  .flat().filter((part) => part[0] === "y");
// Values of a sample's token i.
const all = [];
groups.forEach((group, g) => group.samples.forEach((sample, s) => {
  all.push({ g, s, sample });
  sample.step = group.step;
  sample.versionOf = sample.versions ? spread(sample.versions) : [];
  sample.count = sum(turnsOf(sample).map((part) => part[2].length));
  sample.isClipped = new Set(sample.clipped || []);
}));
function value(sample, name, i) {
  const key = name + "_";
  if (!(key in sample)) sample[key] = sample[name] === undefined ? null : halves(sample[name]);
  return sample[key] ? sample[key][i] : NaN;
}
const now = (sample, i) => updated(value(sample, "logprob", i), value(sample, "rollout", i)); // log-prob by the update's forward
const d = (sample, i) => value(sample, "reference", i);
const advantage = (sample, i) => (sample.weighted === undefined ? sample.advantage : value(sample, "weighted", i));
const gradient = (sample, i) => gradientOf(value(sample, "gradient", i), sample.unit);
const stale = (sample, i) => staleness(sample.step, sample.versionOf[i]);

function* ofTokens(f) { // f of every token of every sample
  for (const { sample } of all) for (let i = 0; i < sample.count; i++) yield f(sample, i);
}

// Colourings: what(sample, i) -> number; full: where the colour is full, or null: the step's 99th percentile, with whole
// its largest.
const COLOURS = [
  { id: "gradient", name: "gradient on its logit", needs: "gradient", both: true, what: gradient, ends: ["less likely", "likelier"],
    help: `Minus the loss's derivative by the token's own logit, as the update computed it: the objective ${O.objective}, with what the recipe adds to it (KL, entropy, guard), times the token's weight in the mean. A token that the policy is sure of is hardly moved, whatever its advantage.` },
  { id: "source", name: "source", help: "Who wrote it: template, question, given passages, the policy, retrieved text, the engine's feedback." },
  { id: "logprob", name: "log-prob", needs: "logprob", full: 5, what: (s, i) => -value(s, "logprob", i), show: (v) => fmt(-v), ends: ["sure", "unlikely"],
    help: "Of the token when it was drawn, in nats." },
  { id: "rollout", name: "ratio to the rollout", needs: "rollout", both: true, full: Math.log(O.high), what: (s, i) => value(s, "rollout", i), show: (v) => fmt(ratioOf(v)),
    ends: ["falls", "rises"], help: "Probability by the update's own forward over that when it was drawn; the colour is full at the upper clip, or at 1.2 where a token's ratio has none. In the first update of a batch it is 1 up to rounding." },
  { id: "reference", name: "ratio to the reference", needs: "reference", both: true, what: d, show: (v) => fmt(ratioOf(v)), ends: ["below", "above"],
    help: "Probability by the policy over that by the reference." },
  { id: "k1", name: "KL, k1", needs: "reference", both: true, what: (s, i) => estimators.k1(d(s, i)), help: "d = log p − log p of the reference." },
  { id: "k2", name: "KL, k2", needs: "reference", what: (s, i) => estimators.k2(d(s, i)), help: "d² / 2, where d = log p − log p of the reference." },
  { id: "k3", name: "KL, k3", needs: "reference", what: (s, i) => estimators.k3(d(s, i)), help: "exp(−d) − 1 + d, where d = log p − log p of the reference." },
  { id: "entropy", name: "entropy", needs: "entropy", what: (s, i) => value(s, "entropy", i), help: "Of the policy's distribution where the token was drawn, in nats." },
  { id: "advantage", name: "advantage", needs: "advantage", both: true, whole: true, what: advantage, help: "Of the sample within its group, or of a branch with a reward of its own; the same for all its tokens, unless grpo.advantage is finer, and but for importance weights." },
  { id: "staleness", name: "staleness", needs: "versions", whole: true, what: stale, help: "Updates between the weights that drew the token and those that it trains: step − 1 − version." },
  { id: "clipped", name: "clipped", needs: "clipped", what: (s, i) => (s.isClipped.has(i) ? 1 : 0), full: 1, tone: "--down", show: (v) => (v ? "clipped" : "–"),
    help: "The clip left the surrogate term of this token no gradient." },
];
const known = (name) => all.some(({ sample }) => sample[name] !== undefined && sample[name] !== null);
const has = (colour) => !colour.needs || known(colour.needs) || (colour.needs === "advantage" && known("weighted"));
const hasAdvantage = has({ needs: "advantage" });
const usable = COLOURS.filter(has);
const scales = {};
function scale(colour) {
  if (scales[colour.id]) return scales[colour.id];
  const values = [...ofTokens(colour.what)].filter((v) => Math.abs(v) > 0);
  return (scales[colour.id] = fullScale(values, colour.full, colour.whole ? 1 : .99));
}
const tone = (colour, v) => colour.tone || (colour.both ? (v > 0 ? "--up" : "--down") : "--one");
const strength = (colour, v) => opacity(v, scale(colour).full);
function paint(colour, v) {
  const alpha = colour.what && v === v ? strength(colour, v) : 0;
  return alpha ? `rgb(var(${tone(colour, v)}) / ${alpha.toFixed(2)})` : "";
}

// Filters: the last entry is the value that some sample needs to have, if any.
const long = longest(all.map(({ sample }) => sample.count));
const FILTERS = [
  ["all", "all samples", () => true],
  ["wrong", "wrong answers", (sample) => sample.right === false, "right"],
  ["right", "right answers", (sample) => sample.right === true, "right"],
  ["clipped", "with clipped tokens", (sample) => sample.isClipped.size > 0, "clipped"],
  ["longest", `longest (from ${long} ${UNIT}s)`, (sample) => sample.count >= long],
  ["signal", "with an advantage", (sample) => Boolean(sample.advantage), "advantage"],
].filter(([, , , needs]) => !needs || known(needs));
const state = { g: 0, s: 0, parts: null, colour: usable[0], filter: FILTERS[0], pin: null };
const passes = (sample) => state.filter[2](sample);

// The rail.
const verdict = (sample) => (sample.right === null ? "" : sample.right ? "right" : "wrong"); // "": the dump does not say
const tint = (sample) => verdict(sample) && `${verdict(sample)}-text`;
const isIdle = (group) => group.samples.every((sample) => sample.advantage === 0);
function drawRail() {
  $("rail").replaceChildren(...groups.map((group, g) => {
    const matching = group.samples.filter(passes).length;
    if (!matching) return "";
    const idle = isIdle(group);
    const dots = group.samples.map((sample) => el("b", { class: `${verdict(sample) || "unknown"} ${passes(sample) ? "" : "off"}`,
      title: `sample ${sample.n}: ${[verdict(sample), known("reward") ? `reward ${fmt(sample.reward)}` : ""].filter(Boolean).join(", ")}` }));
    return el("button", { type: "button", "data-g": g, class: idle ? "idle" : "", onclick: () => go(g, firstOf(g)) },
      el("span", {}, group.question || `group ${group.n}`), el("div", { class: "dots" }, ...dots, idle ? el("em", {}, "no signal") : null));
  }));
}
const firstOf = (g) => Math.max(0, groups[g].samples.findIndex(passes));

// A group.
function pieces(sample, segments, offset, branch, trained = true, skipped = 0) { // elements of segments; returns [nodes, next token's number]
  const group = groups[state.g], nodes = [];
  let at = offset, searches = 0, prompt = null, contexts = 1;
  segments.forEach((part, n) => {
    if (n < skipped) return;
    const address = `${sample.n}/${branch}/${n}`;
    if ("tqg".includes(part[0])) {
      if (!prompt) {
        prompt = el("div", { class: "seg p" });
        nodes.push(n ? el("details", { class: "fold" }, el("summary", {}, `folded: context ${++contexts} begins here`), prompt) : prompt);
      }
      prompt.append(el("span", { class: part[0], "data-seg": address }, group.texts[part[1]]));
      return;
    }
    prompt = null;
    if (part[0] !== "y") {
      const text = el("div", { class: `seg ${part[0]}`, "data-seg": address }, group.texts[part[1]].replace(/^\n+|\n+$/g, ""));
      const search = part[0] === "r" ? sample.searches[searches++] : null;
      nodes.push(part[0] === "r"
        ? el("details", { open: "" }, el("summary", {}, search ? `search ${searches}: ${search[0]} · ${plural(search[1], "passage")}` : "retrieved"), text)
        : text);
      return;
    }
    const other = branch === "" && sample.forked && at < sample.forked[2] ? `written by sample ${sample.forked[0]}` : null;
    const [, text, sizes, , breaks] = part, box = el("div", { class: `seg y${other ? " other" : ""}`, title: other, "data-seg": address });
    let from = 0, waiting = 0;
    sizes.forEach((size, k) => {
      waiting++;
      if (!size && k < sizes.length - 1) return; // its character ends in a later token
      const shown = text.slice(from, from + size), inside = breaks.find((b) => b >= from && b < from + size);
      const lines = inside === undefined ? [shown] : [text.slice(from, inside), el("br"), text.slice(inside, from + size)];
      if (inside === from) box.append(...lines.splice(0, 2));
      const last = at + k, first = last - waiting + 1, marks = { title: null, class: /^\s*\n\s*$/.test(shown) ? "nl" : "" };
      for (let i = Math.max(first, at + 1); i <= last && trained; i++) { // within the turn, newer weights went on
        if (sample.versionOf[i] !== sample.versionOf[i - 1]) Object.assign(marks, { title: `version ${sample.versionOf[i]} of the weights from here on`, class: `${marks.class} fresh`.trim() });
      }
      box.append(el("span", { "data-at": first, "data-n": waiting, "data-b": trained ? null : 1, title: marks.title, class: marks.class || null }, ...lines));
      from += size;
      waiting = 0;
    });
    at += sizes.length;
    nodes.push(box);
  });
  return [nodes, at];
}
const isPrompt = (part) => "tqg".includes(part[0]);
function promptOf(sample) { // of its first context
  const end = sample.segments.findIndex((part) => !isPrompt(part));
  return end < 0 ? sample.segments : sample.segments.slice(0, end);
}
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function drawSample(sample, s) {
  const prompt = promptOf(sample), shared = same(prompt, promptOf(groups[state.g].samples[0])); // shown once, above
  const body = el("div", { class: "body" });
  const [own, end] = pieces(sample, sample.segments, 0, "", true, shared ? prompt.length : 0);
  body.append(...own);
  const next = { true: end, false: 0 }; // the number of a trained branch's first token, and of another's
  for (const [name, segments, trained] of sample.branches || []) {
    const [nodes, after] = pieces(sample, segments, next[trained], name, trained);
    next[trained] = after;
    body.append(el("details", { class: "branch", open: "" }, el("summary", {}, `branch ${name}: ${trained ? "trained" : "rewarded, not trained"}`),
      ...nodes.map((node) => (node.classList.contains("p") ? el("details", {}, el("summary", {}, "its prompt"), node) : node))));
  }
  const facts = [el("strong", {}, `sample ${sample.n}`), ...(verdict(sample) ? [" · ", el("span", { class: tint(sample) }, verdict(sample))] : []),
    known("reward") ? ` · reward ${fmt(sample.reward)}` : "", hasAdvantage ? ` (${known("reward") ? "" : "advantage "}${signed(sample.advantage)})` : "", ` · ${plural(sample.count, UNIT)}`,
    sample.forked ? ` · ${plural(sample.forked[1], "turn")} written by sample ${sample.forked[0]}` : "",
    sample.ending ? ` · ${sample.ending}` : "", sample.isClipped.size ? ` · ${sample.isClipped.size} clipped` : ""];
  const strip = el("canvas", { title: `the sample's ${UNIT}s, first to last`, onclick: (event) => {
    pin(s, Math.floor(event.offsetX / strip.clientWidth * sample.count));
  } });
  return el("article", { class: "sample", "data-s": s, hidden: passes(sample) ? null : "" }, el("header", { onclick: () => go(state.g, s, true) }, ...facts, strip), body);
}

function drawSides(group) {
  const shown = group.samples.map((sample, s) => [sample, s]).filter(([sample]) => passes(sample));
  const names = [...new Set(shown.flatMap(([sample]) => Object.keys(sample.parts)))];
  const parts = [...names.filter((name) => name !== "em").map((name) => [name, (x) => fmt(x.parts[name])]), [`${UNIT}s`, (x) => fmt(x.count)]];
  const isConstant = ([, cell]) => shown.length > 1 && new Set(shown.map(([sample]) => cell(sample))).size === 1;
  const constant = parts.filter(isConstant).map(([name, cell]) => `${name} ${cell(shown[0][0])}`);
  const varied = parts.filter((row) => !isConstant(row)), open = state.parts === null ? innerWidth > 860 && varied.length <= 6 : state.parts;
  const answers = shown.some(([sample]) => sample.answer !== undefined) ? [["answer given", (x) => (x.answer === null ? "none" : x.answer || "")]] : [];
  const rows = [...answers, ...(known("reward") ? [["reward", (x) => fmt(x.reward)]] : []),
    ...(hasAdvantage ? [["advantage", (x) => signed(x.advantage)]] : []), ...(open ? varied : [])];
  const toggle = el("button", { type: "button", onclick: () => { state.parts = !open; $("group").querySelector(".sides").replaceWith(drawSides(group)); go(state.g, state.s); } },
    open ? "fold the reward's parts" : `${varied.length} more: ${varied.map(([name]) => name).join(", ")}`);
  return el("div", { class: "card sides" }, el("div", { class: "scroll" }, el("table", {},
    el("tr", {}, el("th", {}, "sample"), ...shown.map(([sample, s]) => el("th", { "data-col": s }, el("button", { type: "button", onclick: () => go(state.g, s, true) }, String(sample.n))))),
    ...rows.map(([name, cell]) => el("tr", {}, el("td", {}, name), ...shown.map(([sample, s]) => {
      const text = cell(sample);
      return el("td", { "data-col": s, class: name === "answer given" ? tint(sample) : "", title: text }, text);
    }))))), varied.length ? toggle : null, constant.length ? el("div", { class: "small" }, `the same in all: ${constant.join(" · ")}`) : null);
}

function drawGroup() {
  const group = groups[state.g], hidden = group.samples.filter((sample) => !passes(sample)).length;
  const prompt = pieces(group.samples[0], promptOf(group.samples[0]), 0, "")[0];
  $("group").replaceChildren(
    el("div", { class: "asked" }, el("h2", {}, group.question || `group ${group.n}`),
      el("div", { class: "small" }, `group ${group.n}${D.steps ? `, step ${group.step}` : ""}, ${plural(group.samples.length, "sample")}${group.golds ? ` · expected: ${group.golds.join(" or ") || "–"}` : ""}`)),
    el("details", {}, el("summary", {}, "prompt"), ...prompt),
    drawSides(group), el("div", { class: "strong" }),
    hidden ? el("div", { class: "small" }, `${plural(hidden, "sample")} of this group ${hidden === 1 ? "is" : "are"} not shown: ${state.filter[1]} only. `,
      el("button", { type: "button", onclick: () => choose("filter", 0) }, "show all")) : "",
    el("div", { class: "samples" }, ...group.samples.map(drawSample)));
  recolour();
}

// Colours.
function recolour() {
  const colour = state.colour, group = groups[state.g];
  $("group").classList.toggle("by-source", colour.id === "source");
  for (const article of $("group").querySelectorAll(".sample")) {
    const sample = group.samples[article.dataset.s];
    for (const span of article.querySelectorAll("span[data-at]")) {
      const tints = [];
      for (let k = 0; k < +span.dataset.n; k++) {
        const i = +span.dataset.at + k;
        const v = !span.dataset.b ? (colour.what ? colour.what(sample, i) : NaN) : colour.id === "logprob" ? -value(sample, "branch_logprob", i) : NaN;
        tints.push(paint(colour, v) || "transparent");
      }
      const last = tints.length;
      span.style.background = last === 1 ? (tints[0] === "transparent" ? "" : tints[0])
        : `linear-gradient(90deg, ${tints.map((tint, k) => `${tint} ${100 * k / last}% ${100 * (k + 1) / last}%`).join(", ")})`;
    }
    drawStrip(article.querySelector("canvas"), sample);
  }
  drawStrong(group);
  drawLegend();
}
function drawStrip(canvas, sample) {
  const colour = state.colour, style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().split(/\s+/).join(",");
  canvas.hidden = !colour.what || !sample.count;
  if (canvas.hidden) return;
  canvas.width = Math.min(sample.count, 4096);
  canvas.height = 1;
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    const v = colour.what(sample, Math.floor(x * sample.count / canvas.width)), alpha = v === v ? strength(colour, v) : 0;
    context.fillStyle = alpha ? `rgba(${rgb(tone(colour, v))},${Math.min(1, alpha * 1.25)})` : "transparent";
    context.fillRect(x, 0, 1, 1);
  }
}
function tokens(sample) { // [text, id] of each; made once
  if (!sample.tokens) {
    sample.tokens = [];
    for (const part of turnsOf(sample)) {
      let from = 0;
      part[2].forEach((size, k) => { sample.tokens.push([part[1].slice(from, from + size), part[3][k]]); from += size; });
    }
  }
  return sample.tokens;
}
const spelled = ([text, id]) => (text === "" ? `⟨${D.odd[id] || "part of a character"}⟩` : repr(text));
function drawStrong(group) {
  const colour = state.colour, found = [], box = $("group").querySelector(".strong");
  if (colour.what && colour.id !== "advantage") group.samples.forEach((sample, s) => {
    if (passes(sample)) for (let i = 0; i < sample.count; i++) {
      const v = colour.what(sample, i);
      if (Math.abs(v) > 0) found.push([v, s, i]);
    }
  });
  found.sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
  const chips = new Map(); // samples that begin alike have the same token with the same value: once, with their number
  for (const [v, s, i] of found) {
    if (chips.size > 9 || Math.abs(v) < .02 * Math.abs(found[0][0]) || !strength(colour, v)) break;
    const text = spelled(tokens(group.samples[s])[i]), about = colour.show ? colour.show(v) : colour.both ? signed(v) : fmt(v);
    const chip = chips.get(text + about) || { text, about, v, s, i, times: 0 };
    chip.times++;
    chips.set(text + about, chip);
  }
  box.replaceChildren(...(chips.size ? [el("span", { class: "small" }, "largest:"), ...[...chips.values()].map(({ text, about, v, s, i, times }) => {
    const button = el("button", { type: "button", title: `sample ${group.samples[s].n}, ${UNIT} ${i + 1}`, onclick: () => pin(s, i) },
      text, el("small", {}, times > 1 ? `${about} ×${times}` : about));
    button.style.background = paint(colour, v);
    return button;
  })] : []));
}
function drawLegend() {
  const colour = state.colour, legend = $("legend");
  legend.title = colour.help;
  if (colour.id === "source") {
    const keys = [["template", "--one", .12], ["question", null, 0], ["policy", "--up", .13], ["retrieved", null, 1], ["feedback", null, 2]];
    const fixed = ["rgb(38 150 90 / .22)", "rgb(127 127 127 / .16)", "rgb(226 180 87 / .3)"];
    legend.replaceChildren(...keys.flatMap(([name, base, n]) => {
      const key = el("i", { class: "key" });
      key.style.background = base ? `rgb(var(${base}) / ${n * 2})` : fixed[n];
      return [key, name];
    }));
    return;
  }
  const { full, largest } = scale(colour), bar = el("i", {}), show = colour.show || fmt;
  const stops = colour.both ? [[-1, "--down"], [0, "--up"], [1, "--up"]] : [[0, colour.tone || "--one"], [1, colour.tone || "--one"]];
  bar.style.background = `linear-gradient(90deg, ${stops.map(([at, name]) => `rgb(var(${name}) / ${(.77 * Math.abs(at)).toFixed(2)})`).join(", ")})`;
  const [low, high] = colour.ends || [show(colour.both ? -full : 0), show(full)];
  const about = [...(colour.ends ? [`full at ${show(full)}`] : []), ...(colour.full ? [`largest ${show(largest)}`] : [])];
  legend.replaceChildren(low, bar, high, ...(about.length ? [el("span", {}, `· ${about.join(", ")}`)] : []));
}

// The detail of a token.
function valuesOf(sample, i, branch) {
  if (branch) return [["log-prob", fmt(value(sample, "branch_logprob", i))], ["p", fmt(probability(value(sample, "branch_logprob", i)))], ["in the update", "no"]];
  if (sample.forked && i < sample.forked[2]) return [["log-prob", fmt(value(sample, "logprob", i))], ["in the update", `as a token of sample ${sample.forked[0]}`]];
  const rows = [], x = d(sample, i), drawn = value(sample, "logprob", i), add = (name, ...found) => { if (sample[name] !== undefined) rows.push(...found); };
  add("logprob", ["log-prob when drawn", fmt(drawn)], ["p", fmt(probability(drawn))]);
  if (hasAdvantage) rows.push(["advantage", signed(advantage(sample, i))]);
  add("versions", ["drawn by version", fmt(sample.versionOf[i])], ["staleness", fmt(stale(sample, i))]);
  add("gradient", ["gradient", signed(gradient(sample, i))]);
  add("rollout", ["log-prob in the update", fmt(now(sample, i))], ["ratio to the rollout", String(+ratioOf(value(sample, "rollout", i)).toPrecision(6))]);
  add("reference", ["ratio to the reference", fmt(ratioOf(x))], ["k1", signed(estimators.k1(x))], ["k2", fmt(estimators.k2(x))], ["k3", fmt(estimators.k3(x))]);
  add("entropy", ["entropy", fmt(value(sample, "entropy", i))]);
  add("clipped", ["clipped", fmt(sample.isClipped.has(i))]);
  return D.updated && sample.rollout === undefined ? [...rows, ["in the update", "no"]] : rows;
}
function detail(span) {
  const sample = groups[state.g].samples[span.closest(".sample").dataset.s], branch = span.dataset.b, first = +span.dataset.at;
  const nodes = [];
  for (let k = 0; k < +span.dataset.n; k++) {
    const i = first + k, token = branch ? [span.textContent, null] : tokens(sample)[i];
    const where = branch ? "in a branch" : `${UNIT} ${i + 1} of ${sample.count}${D.words ? "" : ` · id ${token[1]}`}${D.odd[token[1]] ? ` · bytes ${D.odd[token[1]]}` : ""}`;
    nodes.push(el("h3", {}, branch ? repr(span.textContent) : spelled(token), el("small", {}, `  sample ${sample.n} · ${where}`)),
      el("dl", {}, ...valuesOf(sample, i, branch).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))));
  }
  $("detail").replaceChildren(...nodes);
}
function unpin() {
  state.pin = null;
  for (const span of $("group").querySelectorAll(".pinned")) span.classList.remove("pinned");
  $("detail").replaceChildren(el("span", { class: "small" }, `Point at a ${UNIT} or tap it: all its values stand here.`));
}
function pinSpan(span) {
  const again = state.pin === span;
  unpin();
  if (again) return;
  state.pin = span;
  span.classList.add("pinned");
  detail(span);
}
function pin(s, i) {
  go(state.g, s);
  for (const span of $("group").querySelectorAll(`.sample[data-s="${s}"] span[data-at]:not([data-b])`)) {
    if (i < +span.dataset.at || i >= +span.dataset.at + +span.dataset.n) continue;
    if (state.pin !== span) pinSpan(span);
    span.scrollIntoView({ block: "center", inline: "nearest" });
    return;
  }
}

// Going about.
function go(g, s, scroll) {
  const other = g !== state.g || !$("group").firstChild;
  Object.assign(state, { g, s });
  if (other) {
    unpin();
    drawGroup();
  }
  for (const button of $("rail").querySelectorAll("button")) {
    const mine = +button.dataset.g === g;
    button.setAttribute("aria-current", mine);
    if (mine && other) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  for (const article of $("group").querySelectorAll(".sample")) article.classList.toggle("now", +article.dataset.s === s);
  for (const cell of $("group").querySelectorAll("[data-col]")) cell.classList.toggle("now", +cell.dataset.col === s);
  const head = $("group").querySelector(`th[data-col="${s}"]`), table = head && head.closest(".scroll");
  if (table && (head.offsetLeft < table.scrollLeft + 120 || head.offsetLeft + head.offsetWidth > table.scrollLeft + table.clientWidth)) table.scrollLeft = head.offsetLeft - 140;
  const article = $("group").querySelector(`.sample[data-s="${s}"]`);
  if (article && (scroll || other)) {
    const row = article.parentNode, step = article.offsetLeft - row.offsetLeft;
    if (step < row.scrollLeft || step + article.offsetWidth > row.scrollLeft + row.clientWidth) row.scrollLeft = step;
    if (scroll && article.getBoundingClientRect().top > innerHeight - 200) article.scrollIntoView({ block: "start", inline: "nearest" });
  }
  remember();
}
function remember() {
  const text = `#g=${groups[state.g].n}&s=${groups[state.g].samples[state.s].n}&c=${state.colour.id}&f=${state.filter[0]}`;
  try { history.replaceState(null, "", text); } catch { /* a viewer without an address */ }
}
function step(by) {
  const list = all.filter(({ sample }) => passes(sample));
  const place = list.findIndex(({ g, s }) => g === state.g && s === state.s);
  const next = list[Math.min(list.length - 1, Math.max(0, place + by))];
  if (next) go(next.g, next.s, true);
}
function stepGroup(by) {
  for (let g = state.g + by; g >= 0 && g < groups.length; g += by) {
    if (groups[g].samples.some(passes)) { go(g, firstOf(g)); scrollTo({ top: 0 }); return; }
  }
}
function choose(what, n) {
  const list = what === "colour" ? usable : FILTERS;
  state[what] = list[(n + list.length) % list.length];
  $(what).value = what === "colour" ? state.colour.id : state.filter[0];
  if (what === "colour") recolour();
  else {
    drawRail();
    const first = all.find(({ g, s, sample }) => passes(sample) && (g > state.g || (g === state.g && s >= 0))) || all.find(({ sample }) => passes(sample));
    $("group").replaceChildren();
    if (first) go(first.g, first.s);
    else $("group").append(el("p", { class: "card" }, `No sample of this step is among "${state.filter[1]}".`));
  }
  if ($("group").querySelector(".sample")) remember();
}

// Finding.
let matches = [], matchAt = -1;
function search() {
  const needle = $("find").value.toLowerCase();
  matches = [];
  matchAt = -1;
  if (needle) for (const { g, s, sample } of all) {
    if (!passes(sample)) continue;
    const texts = groups[g].texts;
    const look = (segments, branch) => segments.forEach((part, n) => {
      if (branch === "" && s > 0 && n < promptOf(sample).length) return; // the first sample's
      const whole = part[0] === "y" ? part[1] : isPrompt(part) ? texts[part[1]] : texts[part[1]].replace(/^\n+|\n+$/g, ""), low = whole.toLowerCase();
      for (let at = low.indexOf(needle); at >= 0 && matches.length < 5000; at = low.indexOf(needle, at + needle.length)) {
        matches.push({ g, s, address: `${sample.n}/${branch}/${n}`, at, size: needle.length });
      }
    });
    look(sample.segments, "");
    for (const [name, segments] of sample.branches || []) look(segments, name);
  }
  $("found").value = needle ? (matches.length ? plural(matches.length, "match") : "none") : "";
  if (window.CSS && CSS.highlights) CSS.highlights.delete("found");
}
function nextMatch(by) {
  if (!matches.length) return;
  matchAt = matchAt < 0 ? Math.max(0, matches.findIndex(({ g }) => g >= state.g)) : (matchAt + by + matches.length) % matches.length;
  const match = matches[matchAt];
  $("found").value = `${matchAt + 1} of ${matches.length}`;
  go(match.g, match.s);
  const box = [...$("group").querySelectorAll("[data-seg]")].find((node) => node.dataset.seg === match.address);
  if (!box) return;
  for (let node = box.parentNode; node && node.id !== "group"; node = node.parentNode) if (node.tagName === "DETAILS") node.open = true;
  const range = document.createRange(), walk = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  let from = 0, node, started = false;
  while ((node = walk.nextNode())) {
    if (!started && match.at < from + node.length) { range.setStart(node, match.at - from); started = true; }
    if (started && match.at + match.size <= from + node.length) { range.setEnd(node, match.at + match.size - from); break; }
    from += node.length;
  }
  if (window.CSS && CSS.highlights && window.Highlight) CSS.highlights.set("found", new Highlight(range));
  (range.startContainer.parentElement || box).scrollIntoView({ block: "center", inline: "nearest" });
}

// The frame.
const KEYS = [["j k", "next, previous sample"], ["n p", "next, previous group"], ["c C", "next, previous colouring"], ["f", "next filter"],
  ["/", "find; Enter and Shift+Enter go from match to match"], ["o", "fold or unfold searches and branches"], ["Esc", "let go of a token, close this"], ["?", "this page"]];
function openHelp() {
  $("help").replaceChildren(el("h2", {}, "Keys"), el("table", {}, ...KEYS.map(([keys, text]) => el("tr", {}, el("td", {}, ...keys.split(" ").flatMap((key) => [el("kbd", {}, key), " "])), el("td", {}, text)))),
    el("h2", { style: "margin-top:14px" }, state.colour.name), el("p", {}, state.colour.help), ...D.notes.map((text) => el("p", {}, text)),
    el("form", { method: "dialog" }, el("button", {}, "close")));
  $("help").showModal();
}
function figures() {
  const samples = all.map(({ sample }) => sample), count = sum(samples.map((sample) => sample.count));
  const over = (f) => { const found = mean(ofTokens(f)); return found === found ? fmt(found) : null; };
  const judged = samples.filter((sample) => sample.right !== null), rights = judged.filter((sample) => sample.right).length;
  const rows = [["groups", fmt(groups.length)], ["samples", fmt(all.length)], ["mean reward", known("reward") ? fmt(mean(samples.map((sample) => sample.reward))) : null],
    ["right", judged.length ? `${percent(rights, judged.length).toFixed(0)}%` : null], [`${UNIT}s written`, fmt(count)],
    ["entropy", over((s, i) => value(s, "entropy", i))],
    ["clipped", known("clipped") ? `${percent(sum(samples.map((sample) => sample.isClipped.size)), count).toFixed(1)}%` : null],
    ["KL, k3", over((s, i) => estimators.k3(d(s, i)))], ["staleness", over(stale)]];
  $("figures").replaceChildren(...rows.filter(([, text]) => text).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
}
function listen() {
  $("colour").append(...COLOURS.map((colour) => el("option", { value: colour.id, disabled: has(colour) ? null : "" }, colour.name)));
  $("filter").append(...FILTERS.map(([id, name, test]) => el("option", { value: id }, id === "all" ? name : `${name}: ${all.filter(({ sample }) => test(sample)).length}`)));
  $("colour").addEventListener("change", () => choose("colour", usable.findIndex((colour) => colour.id === $("colour").value)));
  $("filter").addEventListener("change", () => choose("filter", FILTERS.findIndex(([id]) => id === $("filter").value)));
  $("find").addEventListener("input", search);
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1); });
  $("ask").addEventListener("click", openHelp);
  $("group").addEventListener("pointerover", (event) => { const span = event.target.closest && event.target.closest("span[data-at]"); if (span && !state.pin) detail(span); });
  $("group").addEventListener("click", (event) => {
    const span = event.target.closest("span[data-at]");
    if (!span) return;
    go(state.g, +span.closest(".sample").dataset.s);
    pinSpan(span);
  });
  addEventListener("hashchange", () => location.reload()); // typed by hand, for the page itself replaces it silently
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.key === "Escape") { document.activeElement.blur(); unpin(); return; }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    const keys = {
      j: () => step(1), k: () => step(-1), n: () => stepGroup(1), p: () => stepGroup(-1),
      c: () => choose("colour", usable.indexOf(state.colour) + 1), C: () => choose("colour", usable.indexOf(state.colour) - 1),
      f: () => choose("filter", FILTERS.indexOf(state.filter) + 1), "/": () => { $("find").focus(); $("find").select(); }, "?": openHelp,
      o: () => { const list = [...$("group").querySelectorAll(".sample details")], open = !list.some((node) => node.open); for (const node of list) node.open = open; },
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
}
function start() {
  $("app").hidden = false;
  if (!groups.length) { $("group").append(el("p", { class: "card" }, "No group is on this page.")); return; }
  const asked = new URLSearchParams(location.hash.slice(1));
  state.colour = usable.find(({ id }) => id === asked.get("c")) || state.colour;
  state.filter = FILTERS.find(([id]) => id === asked.get("f")) || state.filter;
  listen();
  figures();
  $("colour").value = state.colour.id;
  $("filter").value = state.filter[0];
  if (D.notes.length) $("app").prepend(el("p", { class: "note" }, D.notes.join(" ")));
  drawRail();
  const g = groups.findIndex(({ n }) => String(n) === asked.get("g"));
  const start = g >= 0 ? g : Math.max(0, groups.findIndex((group) => group.samples.some((sample) => sample.advantage)));
  const s = groups[start].samples.findIndex(({ n }) => String(n) === asked.get("s"));
  go(start, s >= 0 ? s : firstOf(start));
}
start();
})();
