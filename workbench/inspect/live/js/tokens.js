// tokens.js: one row of tokens in the browser, and what can be asked of it. In: the block of strip_columns.py.
// A "group" is the ids that share one shown text: one id, or the siblings of a split character.

import { category, diverging, sequential } from "./colour.js";
import { unpackBlock } from "./columns.js";

export const SAMPLED = 1;
export const FLAGGED = 2;

/** Index of the last [start, value] whose start is <= i; -1 before the first. */
export function spanAt(spans, i) {
  let low = 0, high = spans.length - 1, found = -1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (spans[middle][0] <= i) { found = middle; low = middle + 1; } else high = middle - 1;
  }
  return found;
}

export class Tokens {
  static async from(view) {
    const { words, columns } = await unpackBlock(view);
    return new Tokens(words, columns);
  }

  constructor(words, columns) {
    Object.assign(this, words);
    this.columns = columns;
    this.slot = columns.slot;
    this.flags = columns.flags;
    this.breaking = new Set(words.breaks);
    this.groups = new Map();
    for (const [start, stop, text, kind] of words.joins) {
      for (let i = start; i < stop; i++) this.groups.set(i, { start, stop, text, kind });
    }
    this.sampledBefore = new Int32Array(this.n + 1);
    for (let i = 0; i < this.n; i++) this.sampledBefore[i + 1] = this.sampledBefore[i] + (this.flags[i] & SAMPLED);
    this.scales = new Map();
    this.ranked = null;
    this.joinedText = null;
  }

  group(i) {
    const joined = this.groups.get(i);
    if (joined) return joined;
    return { start: i, stop: i + 1, text: this.texts[this.slot[i]], kind: this.kinds[this.slot[i]] };
  }

  id(i) { return this.columns.ids[this.slot[i]]; }
  sampled(i) { return (this.flags[i] & SAMPLED) === 1; }
  endsLine(i) { return this.breaking.has(this.slot[i]); }
  call(i) { return spanAt(this.calls, i); }
  role(i) { const at = spanAt(this.roles, i); return at < 0 ? 0 : this.roles[at][1]; }

  /** The number behind a colour at token i, or null where there is none. */
  value(signal, i) {
    if (signal === "advantage") return this.spanValue(this.advantages, i);
    if (signal === "version") return this.spanValue(this.versions, i);
    if (signal === "route") return this.spanValue(this.routes, i);
    if (signal === "agreement") return this.agreement(i);
    if (signal === "role") return this.role(i);
    if (signal === "mask") return this.flags[i] & SAMPLED;
    const column = this.columns[signal === "ratio" ? "delta" : signal];
    if (!column || !this.sampled(i)) return null;
    const number = column[this.sampledBefore[i]];
    if (Number.isNaN(number)) return null;
    return signal === "ratio" ? Math.exp(number) : number;
  }

  /** Share of layers whose own router agrees with the replayed route, or null where none was replayed. */
  agreement(i) {
    const share = this.columns.agreement?.[i] ?? 255;
    return share === 255 ? null : share / 254;
  }

  spanValue(spans, i) {
    const at = spanAt(spans, i);
    return at < 0 ? null : spans[at][1];
  }

  /** {rgb, alpha, level} of token i under a signal, or null for no colour. */
  tone(signal, i) {
    const value = this.value(signal, i);
    if (value === null) return null;
    if (signal === "role") return this.sampled(i) ? { rgb: [232, 135, 43], alpha: 0.2, level: 0 } : category(value);
    if (signal === "mask") return value ? { rgb: [232, 135, 43], alpha: 0.28, level: 0 } : null;
    if (signal === "route") return category({ full: 3, tail: 4, sentinel: 0 }[value] ?? 0);
    if (signal === "agreement") return sequential(1 - value);
    if (signal === "version") return category(1 + (value % 6));
    const scale = this.scale(signal);
    if (signal === "logprob" || signal === "trainer") return sequential(value / scale);
    return diverging((signal === "ratio" ? Math.log(value) : value) / scale);
  }

  /** The value at which a colour is full: the 99th percentile by size, so that one outlier does not wash out the rest. */
  scale(signal) {
    if (this.scales.has(signal)) return this.scales.get(signal);
    let full = 1;
    if (signal === "advantage") {
      full = Math.max(1e-9, ...this.advantages.map(([, value]) => Math.abs(value ?? 0)));
    } else {
      const column = this.columns[signal === "ratio" ? "delta" : signal];
      const sizes = Float32Array.from(column).filter((x) => !Number.isNaN(x)).map(Math.abs).sort();
      full = Math.max(1e-6, sizes.length ? sizes[Math.floor(0.99 * (sizes.length - 1))] : 1);
      if (signal === "logprob" || signal === "trainer") full = -Math.max(full, 0.05);
    }
    this.scales.set(signal, full);
    return full;
  }

  /** First token from `from` on (wrapping round) for which `test` holds; -1 for none. */
  next(from, test) {
    for (let k = 0; k < this.n; k++) {
      const i = (from + k) % this.n;
      if (test(i)) return i;
    }
    return -1;
  }

  /** Sampled tokens by |delta|, largest first. */
  worst() {
    if (this.ranked) return this.ranked;
    const column = this.columns.delta;
    const scored = [];
    if (column) {
      for (let i = 0; i < this.n; i++) {
        if (this.sampled(i) && !Number.isNaN(column[this.sampledBefore[i]])) scored.push(i);
      }
      const size = (i) => Math.abs(column[this.sampledBefore[i]]);
      scored.sort((a, b) => size(b) - size(a) || a - b);
    }
    this.ranked = scored;
    return scored;
  }

  /** Token indices where `text` begins, in the text as it is shown. */
  find(text, limit = 10000) {
    if (!this.joinedText) {
      const parts = [];
      this.offsets = new Int32Array(this.n + 1);
      let at = 0;
      for (let i = 0; i < this.n; i++) {
        this.offsets[i] = at;
        const group = this.group(i);
        if (group.start === i) { parts.push(group.text); at += group.text.length; }
      }
      this.offsets[this.n] = at;
      this.joinedText = parts.join("");
    }
    const haystack = this.joinedText.toLowerCase(), needle = text.toLowerCase();
    const hits = [];
    let token = 0;
    for (let at = haystack.indexOf(needle); at >= 0 && hits.length < limit; at = haystack.indexOf(needle, at + needle.length)) {
      while (token + 1 < this.n && this.offsets[token + 1] <= at) token++;
      if (hits[hits.length - 1] !== token) hits.push(token);
    }
    return hits;
  }

  /** One line about token i: every signal there is. */
  describe(i) {
    const group = this.group(i);
    const ids = [];
    for (let k = group.start; k < group.stop; k++) ids.push(`${this.id(k)}`);
    const call = this.calls[this.call(i)];
    const parts = [
      `token ${i.toLocaleString("en-US")}`, `id ${ids.join(" + ")}`, `“${group.text}”`,
      this.sampled(i) ? "sampled (mask 1)" : `carried (mask 0), ${this.role_names[this.role(i)]}`,
    ];
    for (const [signal, words] of [["logprob", "sampler"], ["trainer", "trainer"], ["delta", "Δ"], ["ratio", "ratio"], ["advantage", "advantage"]]) {
      const value = this.value(signal, i);
      if (value !== null && value !== undefined) parts.push(`${words} ${value.toFixed(4)}`);
    }
    if (call) parts.push(`call ${call[2]}${this.versionWords(i)}`);
    if (this.flags[i] & FLAGGED) parts.push("⚠ control id inside a span of content");
    return parts.join(" · ");
  }

  versionWords(i) {
    const version = this.value("version", i);
    return version === null ? "" : ` · weights v${version}`;
  }
}
