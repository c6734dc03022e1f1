// chain.js: the live PrefixChain. One row a root-to-leaf path, calls left to right; only the cards in sight are in the
// document. The whole tree is at hand, as typed arrays in drawing order.

import { count, custodyLine, h, Shell } from "./shell.js";
import { unpackBlock } from "./columns.js";

const CARD = { w: 174, h: 62, x: 198, y: 88, left: 12, top: 22 };
const MAP_HEIGHT = 372;
const SVG = "http://www.w3.org/2000/svg";
const LABELS = {
  earliest: "no terminal call chosen", retry: "retry", branch: "side branch",
  side_root: "conversation of its own", failed: "failed", unresolved: "unresolved",
};

export default {
  render(context) {
    return new Shell(context, "PrefixChain").run(buildChain);
  },
};

class Chain {
  constructor(words, columns, name) {
    Object.assign(this, words);
    this.columns = columns;
    this.name = name;
    this.n = columns.row.length;
    this.rows = [];
    this.firstChild = new Int32Array(this.n).fill(-1);
    this.trunks = new Map();
    this.scale = 1;
    this.depth = 0;
    for (let i = 0; i < this.n; i++) {
      const row = columns.row[i];
      (this.rows[row] ??= []).push(i);
      this.depth = Math.max(this.depth, columns.column[i] + 1);
      this.scale = Math.max(this.scale, this.number("delta_len", i) ?? 0);
      const parent = columns.parent[i];
      if (parent < 0) continue;
      if (this.firstChild[parent] < 0) this.firstChild[parent] = i;
      if (columns.row[parent] !== row) {
        const trunk = this.trunks.get(parent) ?? { last: 0 };
        trunk.last = Math.max(trunk.last, row);
        this.trunks.set(parent, trunk);
      }
    }
    for (const row of this.rows) row.sort((a, b) => columns.column[a] - columns.column[b]);
  }

  number(name, i) { const value = this.columns[name][i]; return value === this.unknown ? null : value; }
  word(name, i) { return this.tables[name][this.columns[name][i]]; }
  contends(i) { return this.columns.contends[i] === 1; }
  lost(i) { return this.word("failure_reason", i) !== ""; }
  kind(i) { return this.word("relation", i) === "chain" ? "chain" : this.lost(i) ? "lost" : ""; }
  x(i) { return CARD.left + this.columns.column[i] * CARD.x; }
  y(i) { return CARD.top + this.columns.row[i] * CARD.y; }

  label(i) {
    const relation = this.word("relation", i), parent = this.columns.parent[i];
    const said = relation === "chain" ? this.name : LABELS[relation] ?? relation;
    if (this.lost(i) && parent < 0) return "not captured: no place in the tree";
    if (parent < 0) return said;
    return `${said} ${this.lost(i) ? "near" : "after"} #${this.columns.order[parent]}`;
  }

  amounts(i) {
    const delta = this.number("delta_len", i), sampled = this.number("sampled_tokens", i);
    if (delta === null) return "no tokens recorded";
    if (sampled === null) return `+${delta.toLocaleString("en-US")} tokens`;
    return `+${(delta - sampled).toLocaleString("en-US")} carry +${sampled.toLocaleString("en-US")} sampled`;
  }

  describe(i) {
    const total = this.number("cum_len", i), version = this.number("weight_version", i);
    return [
      `call #${this.columns.order[i]} ${this.ids[i]}`, this.word("mode", i), this.amounts(i),
      total === null ? "" : `${total.toLocaleString("en-US")} tokens in all`, version === null ? "" : `weights v${version}`,
      this.word("finish_reason", i) && `finish ${this.word("finish_reason", i)}`, this.digests[i] && `digest ${this.digests[i]}`,
      this.word("why", i),
    ].filter(Boolean).join(" · ");
  }

  matches(i, needle) {
    return `#${this.columns.order[i]} ${this.ids[i]} ${this.word("why", i)} ${this.word("finish_reason", i)} ${this.word("mode", i)}`
      .toLowerCase().includes(needle);
  }
}

function buildChain(shell) {
  const { model } = shell;
  const title = h("div", { class: "wb-title" });
  const custody = h("div");
  const search = h("input", { placeholder: "/ find: #3, id, cause", "aria-label": "find a call", title: "find a call by its place (#3), its id, retry, length or cause" });
  const note = h("span", { class: "wb-note", role: "status" });
  const links = document.createElementNS(SVG, "svg");
  const cards = h("div");
  const space = h("div", { class: "wb-space" }, links, cards);
  const map = h("div", { class: "wb-map" }, space);
  const detail = h("div", { class: "wb-detail" });
  const legend = h("div", { class: "wb-legend" });
  const choose = h("button", { text: "show tokens (Enter)" });
  const bar = h("div", { class: "wb-bar" }, search, choose, note);
  let chain = null, at = 0;

  async function load() {
    title.textContent = model.get("sentence");
    const view = model.get("block");
    shell.idle = true;
    bar.hidden = map.hidden = legend.hidden = !view || !view.byteLength;
    detail.classList.toggle("wb-missing", map.hidden);
    if (map.hidden) { detail.textContent = model.get("missing"); return; }
    const { words, columns } = await unpackBlock(view);
    chain = new Chain(words, columns, model.get("chain_name"));
    custody.replaceChildren(custodyLine(model.get("custody")));
    space.style.width = `${CARD.left + chain.depth * CARD.x}px`;
    space.style.height = `${CARD.top + chain.rows.length * CARD.y}px`;
    map.style.height = `${Math.min(MAP_HEIGHT, CARD.top + chain.rows.length * CARD.y + 18)}px`;
    whole();
    explain();
    map.scrollLeft = map.scrollTop = 0;
    shell.idle = false;
    // Where no terminal could be chosen, the calls that it hangs on are what one comes to see.
    go(Math.max(0, chain.ids.findIndex((_, i) => chain.contends(i))));
  }

  function explain() {
    const mark = (look, words) => h("span", {}, h("i", { style: look }), words);
    const split = chain.columns.sampled_tokens.some((value) => value !== chain.unknown);
    const occurs = (test) => chain.ids.some((_, i) => test(i));
    legend.replaceChildren(...[
      occurs((i) => chain.kind(i) === "chain") && mark("border-top:3px solid var(--wb-blue)", chain.name),
      split && mark("background:repeating-linear-gradient(135deg,var(--wb-blue) 0 2px,transparent 2px 5px)", "carried into the prompt"),
      split && mark("background:var(--wb-orange)", "sampled by the policy"),
      !split && h("span", { class: "wb-missing", text: "carry and sampled tokens cannot be told apart: no tokens are recorded here" }),
      occurs((i) => chain.lost(i)) && mark("border:1.5px dashed var(--wb-bad)", "failed or unresolved"),
      occurs((i) => chain.contends(i)) && mark("border:3px double var(--wb-bad)", "could be the last call"),
      h("span", { text: "? keys" }),
    ].filter(Boolean));
  }

  function draw() {
    if (!chain) return;
    const seen = { left: map.scrollLeft, top: map.scrollTop, right: map.scrollLeft + map.clientWidth, bottom: map.scrollTop + map.clientHeight };
    const firstRow = Math.max(0, Math.floor((seen.top - CARD.top - CARD.y) / CARD.y));
    const lastRow = Math.min(chain.rows.length - 1, Math.ceil((seen.bottom - CARD.top) / CARD.y));
    const firstColumn = Math.floor((seen.left - CARD.left) / CARD.x) - 1;
    const lastColumn = Math.ceil((seen.right - CARD.left) / CARD.x);
    const shown = [], paths = [];
    for (let row = firstRow; row <= lastRow; row++) {
      const calls = chain.rows[row];
      for (let k = firstAtColumn(calls, firstColumn); k < calls.length && chain.columns.column[calls[k]] <= lastColumn; k++) {
        shown.push(...card(calls[k], k === 0));
        const link = linkTo(calls[k]);
        if (link) paths.push(link);
      }
    }
    for (const [parent, trunk] of chain.trunks) {
      const column = chain.columns.column[parent];
      if (column < firstColumn || column > lastColumn) continue;
      if (chain.columns.row[parent] > lastRow || trunk.last < firstRow) continue;
      const x = chain.x(parent) + CARD.w + 11, from = Math.max(chain.y(parent) + CARD.h / 2, seen.top - 50);
      const to = Math.min(CARD.top + trunk.last * CARD.y + CARD.h / 2, seen.bottom + 50);
      paths.push(line(`M${x - 11} ${chain.y(parent) + CARD.h / 2}H${x}M${x} ${from}V${to}`, "var(--wb-muted)", 1.2, ""));
    }
    cards.replaceChildren(...shown);
    links.replaceChildren(...paths);
  }

  function firstAtColumn(calls, column) {
    let low = 0, high = calls.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (chain.columns.column[calls[middle]] < column) low = middle + 1; else high = middle;
    }
    return low;
  }

  function linkTo(i) {
    const parent = chain.columns.parent[i];
    if (parent < 0) return null;
    const y = chain.y(i) + CARD.h / 2, right = chain.x(parent) + CARD.w;
    const same = chain.columns.row[parent] === chain.columns.row[i];
    const main = chain.kind(i) === "chain", lost = chain.kind(i) === "lost";
    return line(`M${same ? right : right + 11} ${y}H${chain.x(i)}`,
      main ? "var(--wb-blue)" : lost ? "var(--wb-bad)" : "var(--wb-muted)", main ? 3.2 : 1.2, lost ? "5 3" : "");
  }

  function line(path, colour, width, dashes) {
    const node = document.createElementNS(SVG, "path");
    for (const [name, value] of Object.entries({ d: path, stroke: colour, "stroke-width": width, fill: "none", "stroke-dasharray": dashes })) {
      if (value !== "") node.setAttribute(name, value);
    }
    return node;
  }

  function card(i, head) {
    const version = chain.number("weight_version", i), kind = chain.kind(i);
    const side = [chain.word("mode", i), version === null ? "" : `v${version}`].filter(Boolean).join(" · ");
    const node = h("div", {
      class: `wb-card ${kind}${chain.contends(i) ? " contends" : ""}${i === at ? " at" : ""}${chain.ids[i] === model.get("selected") ? " chosen" : ""}`, "data-i": i,
      "data-call": chain.ids[i], style: `left:${chain.x(i)}px;top:${chain.y(i)}px;width:${CARD.w}px;height:${CARD.h}px`,
    }, h("div", { class: "wb-top" }, h("span", { class: "wb-name", text: `#${chain.columns.order[i]} ${chain.names[i]}` }), h("span", { text: side })));
    // What is too long for the card is cut with an ellipsis; its title and the line below the map have it whole.
    const cut = (text) => h("div", { text, title: text ?? "" });
    if (kind === "lost") node.append(cut(chain.word("failure_reason", i)), cut(chain.word("detail", i)));
    else node.append(amount(i), h("div", { text: chain.amounts(i) }), h("div", { class: "wb-mono", text: [chain.contends(i) ? "last call?" : "", chain.word("finish_reason", i), chain.digests[i]].filter(Boolean).join(" · ") }));
    if (!head) return [node];
    return [h("div", { class: `wb-branch ${kind}`, text: chain.label(i), style: `left:${chain.x(i) + 2}px;top:${chain.y(i) - 17}px` }), node];
  }

  function amount(i) {
    const delta = chain.number("delta_len", i) ?? 0, sampled = chain.number("sampled_tokens", i);
    const bar = h("div", { class: "wb-amount" });
    if (sampled === null) return h("div", { class: "wb-amount" }, h("span", { style: `background:var(--wb-muted);width:${(100 * delta) / chain.scale}%` }));
    const part = (look, size) => h("span", { class: look, style: `width:${(100 * size) / chain.scale}%` });
    bar.append(part("c", delta - sampled), part("g", sampled));
    return bar;
  }

  function go(i) {
    if (i < 0 || i >= chain.n) return;
    at = i;
    const x = chain.x(i), y = chain.y(i);
    if (x < map.scrollLeft || x + CARD.w > map.scrollLeft + map.clientWidth) map.scrollLeft = Math.max(0, x - map.clientWidth / 3);
    if (y - 18 < map.scrollTop || y + CARD.h > map.scrollTop + map.clientHeight) map.scrollTop = Math.max(0, y - map.clientHeight / 3);
    detail.textContent = chain.describe(i);
    draw();
  }

  function moveRow(by) {
    const calls = chain.rows[chain.columns.row[at] + by];
    if (!calls) return;
    const column = chain.columns.column[at];
    go(calls[Math.min(calls.length - 1, firstAtColumn(calls, column))]);
  }

  function moveBranch(by) {
    const row = chain.columns.row[at] + by;
    if (row >= 0 && row < chain.rows.length) go(chain.rows[row][0]);
  }

  function moveCall(by) {
    if (by < 0) return go(chain.columns.parent[at]);
    go(chain.firstChild[at]);
  }

  /** The next call, in drawing order, that is not on the chain. */
  function nextApart() {
    for (let k = 1; k <= chain.n; k++) {
      const i = (at + k) % chain.n;
      if (chain.word("relation", i) !== "chain") return go(i);
    }
    note.textContent = "every call is on the chain";
  }

  function whole() {
    note.textContent = `${count(chain.n, "call")} on ${count(chain.rows.length, "path")}, all at hand`;
  }

  function seek() {
    const needle = search.value.trim().toLowerCase();
    if (!needle) return whole();
    const hits = [];
    for (let i = 0; i < chain.n; i++) if (chain.matches(i, needle)) hits.push(i);
    const after = hits.find((i) => i > at) ?? hits[0];
    note.textContent = hits.length ? `${hits.indexOf(after) + 1} of ${count(hits.length, "call")} found` : `“${needle}” does not occur`;
    if (hits.length) go(after);
  }

  function open() {
    shell.send("selected", chain.ids[at]);
    draw();
  }

  shell.body.append(title, custody, bar, map, detail, legend);
  shell.listen(map, "scroll", draw, { passive: true });
  shell.listen(map, "click", (event) => {
    const node = event.target.closest("[data-i]");
    if (node) { go(Number(node.getAttribute("data-i"))); open(); }
  });
  shell.listen(choose, "click", open);
  shell.listen(search, "keydown", (event) => { if (event.key === "Enter") seek(); });
  shell.bind([
    ["j", "next path", () => moveRow(1)],
    ["k", "previous path", () => moveRow(-1)],
    ["n", "next call on the path", () => moveCall(1)],
    ["p", "the call it continues", () => moveCall(-1)],
    ["]", "head of the next branch", () => moveBranch(1)],
    ["[", "head of the previous branch", () => moveBranch(-1)],
    ["d", "next call beside the chain", nextApart],
    ["/", "find a call (Enter: next)", () => search.focus()],
    ["Enter", "show its tokens", open],
  ]);
  shell.watch("selected", draw);
  shell.watch("block", load);
  shell.watchLook(draw);
  return load();
}
