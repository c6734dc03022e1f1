// pane.js: a ribbon of the whole row over a window of its text. Only the lines in sight are in the document:
// at most 88 characters a line and `rows` lines, so fewer than 2,000 nodes whatever the length of the row.

import { h } from "./shell.js";
import { css } from "./colour.js";
import { FLAGGED } from "./tokens.js";

const LINE = 22;
const MOST_COLUMNS = 88;
const GUTTER = 90;

export class Pane {
  constructor(shell, host, { rows = 16, columns = MOST_COLUMNS } = {}) {
    this.shell = shell;
    this.rows = rows;
    this.mostColumns = columns;
    this.tokens = null;
    this.signal = "role";
    this.cursor = 0;
    this.found = new Set();
    this.differs = null;
    this.onCursor = () => {};
    this.onScroll = () => {};
    this.values = h("canvas", { height: 1, style: "height:12px" });
    this.mask = h("canvas", { height: 1, style: "height:5px" });
    this.here = h("div", { class: "wb-here" });
    this.ribbon = h("div", { class: "wb-ribbon", title: "the whole row; click to go there" }, this.values, this.mask, this.here);
    this.lines = h("div", { class: "wb-lines" });
    this.space = h("div", { class: "wb-space" }, this.lines);
    this.scroller = h("div", { class: "wb-scroll", style: `height:${rows * LINE}px` }, this.space);
    host.append(this.ribbon, this.scroller);
    shell.listen(this.scroller, "scroll", () => { this.draw(); this.onScroll(this.topToken()); }, { passive: true });
    shell.listen(this.scroller, "click", (event) => this.#click(event));
    shell.listen(this.ribbon, "click", (event) => {
      const box = this.ribbon.getBoundingClientRect();
      this.go(Math.floor(((event.clientX - box.left) / box.width) * this.tokens.n));
    });
  }

  show(tokens) {
    this.tokens = tokens;
    this.cursor = Math.min(this.cursor, Math.max(0, tokens.n - 1));
    this.found = new Set();
    this.width = 0;
    this.relayout();
  }

  /** Lines again, if the width has changed; then ribbon and window. */
  relayout() {
    if (!this.tokens) return;
    const width = this.scroller.clientWidth;
    if (width && width !== this.width) {
      this.width = width;
      this.#layout();
    }
    this.paint();
  }

  paint() {
    this.#paintRibbon();
    this.draw();
  }

  colourBy(signal) {
    this.signal = signal;
    this.paint();
  }

  /** Moves the cursor to token i and brings it into sight. */
  go(i, { centre = true } = {}) {
    if (!this.tokens || !this.tokens.n) return;
    this.cursor = Math.min(Math.max(0, i), this.tokens.n - 1);
    const line = this.lineOf(this.cursor);
    const top = line * LINE, seen = this.scroller.scrollTop;
    if (top < seen || top + LINE > seen + this.scroller.clientHeight) {
      this.scroller.scrollTop = centre ? Math.max(0, top - (this.rows >> 1) * LINE) : Math.max(0, top - LINE);
    }
    this.draw();
    this.onCursor(this.cursor);
  }

  moveLine(by) {
    let line = this.lineOf(this.cursor) + by;
    while (line >= 0 && line < this.count && this.kind[line] >= 0) line += Math.sign(by);
    if (line >= 0 && line < this.count) this.go(this.from[line], { centre: false });
  }

  moveCall(by) {
    const calls = this.tokens.calls;
    const at = this.tokens.call(this.cursor) + by;
    if (at >= 0 && at < calls.length) this.go(calls[at][0]);
  }

  /** To the next (or last) place where the mask changes. */
  moveSpan(by) {
    const { tokens } = this;
    let i = this.cursor;
    if (by < 0) {
      if (i > 0 && tokens.sampled(i - 1) !== tokens.sampled(i)) i--;
      while (i > 0 && tokens.sampled(i - 1) === tokens.sampled(i)) i--;
    } else {
      const here = tokens.sampled(i);
      while (i + 1 < tokens.n && tokens.sampled(i) === here) i++;
    }
    this.go(i);
  }

  lineOf(i) {
    let low = 0, high = this.count - 1, found = 0;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.from[middle] <= i) { found = middle; low = middle + 1; } else high = middle - 1;
    }
    return found;
  }

  topToken() {
    return this.count ? this.from[Math.min(this.count - 1, Math.floor(this.scroller.scrollTop / LINE))] : 0;
  }

  scrollToToken(i) {
    this.scroller.scrollTop = this.lineOf(i) * LINE;
  }

  #layout() {
    const { tokens } = this;
    const columns = Math.max(16, Math.min(this.mostColumns, Math.floor((this.width - GUTTER) / this.#characterWidth())));
    const widths = tokens.texts.map(shownWidth);
    const from = [], kind = [];
    let start = 0, used = 0, call = 0;
    const push = (at, what) => { from.push(at); kind.push(what); };
    for (let i = 0; i < tokens.n;) {
      const group = tokens.groups.get(i);
      if (call < tokens.calls.length && tokens.calls[call][0] <= i) {
        if (i > start) push(start, -1);
        push(i, call++);
        start = i;
        used = 0;
      }
      const wide = group ? shownWidth(group.text) : widths[tokens.slot[i]];
      if (used && used + wide > columns) { push(start, -1); start = i; used = 0; }
      used += wide;
      const breaks = !group && tokens.endsLine(i);
      i = group ? group.stop : i + 1;
      if (breaks) { push(start, -1); start = i; used = 0; }
    }
    if (start < tokens.n) push(start, -1);
    this.from = Int32Array.from(from);
    this.kind = Int32Array.from(kind);
    this.count = from.length;
    this.space.style.height = `${this.count * LINE}px`;
  }

  #characterWidth() {
    const probe = h("span", { class: "wb-t", text: "0".repeat(50) });
    const line = h("div", { class: "wb-line", style: "position:absolute;visibility:hidden" }, probe);
    this.space.append(line);
    const width = probe.getBoundingClientRect().width / 50;
    line.remove();
    return width || 7.6;
  }

  draw() {
    if (!this.tokens || !this.from) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / LINE) - 1);
    const last = Math.min(this.count, first + this.rows + 2);
    const shown = [];
    for (let line = first; line < last; line++) shown.push(this.#line(line));
    this.lines.style.top = `${first * LINE}px`;
    this.lines.replaceChildren(...shown);
    const end = last < this.count ? this.from[last] : this.tokens.n;
    const start = this.count ? this.from[first] : 0;
    this.here.style.left = `${(100 * start) / Math.max(1, this.tokens.n)}%`;
    this.here.style.width = `${(100 * (end - start)) / Math.max(1, this.tokens.n)}%`;
  }

  #line(line) {
    const { tokens } = this;
    const i = this.from[line];
    if (this.kind[line] >= 0) {
      const words = `call ${tokens.calls[this.kind[line]][2]}${tokens.versionWords(i)}`;
      return h("div", { class: "wb-line call" }, h("span", { class: "wb-gutter", text: "" }), words);
    }
    const end = line + 1 < this.count ? this.from[line + 1] : tokens.n;
    const who = tokens.sampled(i) ? "▁" : tokens.role_names[tokens.role(i)][0];
    const row = h("div", { class: "wb-line" }, h("span", { class: "wb-gutter", text: `${i.toLocaleString("en-US")} ${who}` }));
    for (let k = i; k < end;) {
      const group = tokens.group(k);
      row.append(this.#token(k, group));
      k = group.stop;
    }
    return row;
  }

  #token(i, group) {
    const { tokens } = this;
    let look = "wb-t";
    if (tokens.sampled(i)) look += " s";
    else if (this.signal === "mask") look += " m";
    if (group.kind) look += ` k${group.kind}`;
    if (tokens.flags[i] & FLAGGED) look += " f";
    if (this.found.has(i)) look += " found";
    if (this.differs && this.differs[i]) look += " differs";
    if (this.cursor >= group.start && this.cursor < group.stop) look += " at";
    const node = h("span", { class: look, "data-i": i, text: group.text });
    const tone = tokens.tone(this.signal, i);
    if (tone) {
      node.style.backgroundColor = css(tone);
      if (tone.level) node.style.boxShadow = `inset 0 ${tone.level}px 0 rgba(${tone.rgb.join(",")},.95)`;
    }
    return node;
  }

  #paintRibbon() {
    const { tokens } = this;
    const pixels = Math.max(1, Math.min(2000, Math.floor(this.ribbon.clientWidth)));
    const width = Math.min(pixels, Math.max(1, tokens.n));
    const values = new ImageData(width, 1), mask = new ImageData(width, 1);
    const numeric = ["logprob", "trainer", "delta", "ratio"].includes(this.signal);
    for (let x = 0; x < width; x++) {
      const start = Math.floor((x * tokens.n) / width), stop = Math.max(start + 1, Math.floor(((x + 1) * tokens.n) / width));
      let best = start, size = -1, sampled = 0;
      for (let i = start; i < stop && i < tokens.n; i++) {
        sampled += tokens.flags[i] & 1;
        if (!numeric) continue;
        const value = tokens.value(this.signal, i);
        const telling = value === null ? -1 : Math.abs(this.signal === "ratio" ? Math.log(value) : value);
        if (telling > size) { size = telling; best = i; }
      }
      const tone = tokens.n ? tokens.tone(this.signal, best) : null;
      values.data.set(tone ? [...tone.rgb, Math.round(255 * Math.min(1, tone.alpha + 0.3))] : [128, 128, 128, 40], 4 * x);
      const share = sampled / (stop - start);
      mask.data.set(share ? [201, 106, 18, Math.round(90 + 165 * share)] : [128, 128, 128, 50], 4 * x);
    }
    for (const [canvas, image] of [[this.values, values], [this.mask, mask]]) {
      canvas.width = width;
      canvas.getContext("2d").putImageData(image, 0, 0);
    }
  }

  #click(event) {
    const node = event.target.closest("[data-i]");
    if (node) this.go(Number(node.getAttribute("data-i")));
  }
}

/** Columns a text takes: wide characters (East Asian, emoji) count two, marks that combine none. */
function shownWidth(text) {
  let wide = 0;
  for (const char of text) {
    const code = char.codePointAt(0);
    if ((code >= 0x300 && code <= 0x36f) || code === 0x200d || (code >= 0xfe00 && code <= 0xfe0f)) continue;
    wide += code >= 0x1100 && (code <= 0x115f || (code >= 0x2e80 && code <= 0xa4cf) || (code >= 0xac00 && code <= 0xd7a3) ||
      (code >= 0xf900 && code <= 0xfaff) || (code >= 0xff00 && code <= 0xff60) || code >= 0x1f300) ? 2 : 1;
  }
  return wide;
}
