"use strict";
// The formulas of the token page, without the page: what it computes from a token's stored values.
// Ratio and KL are those of kernels/objective.py; tests compare them with torch's over a table. The gradient is stored.
// The page inlines this file before token_view.js.
const FORMULAS = (() => {
const EXP_CAP = 80;
const ratioOf = (logRatio) => Math.exp(Math.min(logRatio, EXP_CAP));

// The KL estimators of one token. d: log p - log p of the reference.
const estimators = { k1: (d) => d, k2: (d) => d * d / 2, k3: (d) => Math.expm1(Math.min(-d, EXP_CAP)) + d };

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
return { ratioOf, estimators, fullScale, opacity, halves };
})();
