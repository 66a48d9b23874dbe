"use strict";
// The formulas of the token page, without the page: what it computes from a token's stored values.
// Ratio and KL are those of kernels/objective.py; tests compare each formula with its Python on random values. The
// gradient is stored, as a share of the sample's largest.
// The page inlines this file before token_view.js.
const FORMULAS = (() => {
const EXP_CAP = 80;
const ratioOf = (logRatio) => Math.exp(Math.min(logRatio, EXP_CAP));

// The KL estimators of one token. d: log p - log p of the reference.
const estimators = { k1: (d) => d, k2: (d) => d * d / 2, k3: (d) => Math.expm1(Math.min(-d, EXP_CAP)) + d };

// The log-prob by the update's forward, from the one when drawn and their difference; a log-prob as a probability; the
// gradient on the token's logit, from its stored share and the sample's unit.
const updated = (drawn, drift) => drawn + drift;
const probability = (logprob) => Math.exp(logprob);
const gradientOf = (share, unit) => share * unit;

// Staleness: updates between the weights that drew a token and those that it trains. A step trains the weights of
// version step - 1. spread: the version of each token from runs [version, tokens]; NaN where it is null.
const staleness = (step, version) => step - 1 - version;
const spread = (runs) => runs.flatMap(([version, tokens]) => Array(tokens).fill(version === null ? NaN : version));

// Measures of the page. mean: of the values that are numbers, NaN without any. longest: the length from which the
// longest tenth of samples begins.
function mean(values) {
  let total = 0, count = 0;
  for (const value of values) if (typeof value === "number" && value === value) { total += value; count++; }
  return count ? total / count : NaN;
}
const percent = (part, whole) => 100 * part / Math.max(1, whole);
function longest(lengths) {
  const sorted = [...lengths].sort((a, b) => b - a);
  return sorted[Math.max(0, Math.ceil(sorted.length / 10) - 1)];
}

// Colours. The value at which a colour is full: `fixed`, or else the 99th percentile of the sizes (or the largest size).
// largest: the value of the largest size, with its sign.
function fullScale(values, fixed, share = .99) {
  const sorted = Float64Array.from(values).sort((a, b) => Math.abs(a) - Math.abs(b)), at = (part) => sorted[Math.floor(part * (sorted.length - 1))] || 0;
  return { full: fixed || Math.abs(at(share)) || 1, largest: at(1) };
}
// How opaque the colour of a value is, from 0 to .77; values below 1.5% of the full scale have none.
function opacity(value, full) {
  const share = Math.min(1, Math.abs(value) / full);
  return share > .015 ? .07 + .7 * share : 0;
}

// float16, little-endian, in base64; what is not finite is NaN.
function halves(text) {
  const bytes = atob(text), values = new Float32Array(bytes.length / 2);
  for (let n = 0; n < values.length; n++) {
    const bits = bytes.charCodeAt(2 * n) | (bytes.charCodeAt(2 * n + 1) << 8);
    const sign = bits >> 15 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
    values[n] = power === 31 ? NaN : sign * (power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024));
  }
  return values;
}
return { ratioOf, estimators, updated, probability, gradientOf, staleness, spread, mean, percent, longest, fullScale, opacity, halves };
})();
