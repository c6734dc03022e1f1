// diff.js: the live RowDiff. The arms in numbers, the pairs that flip, and both strips locked to one another.

import { count, custodyLine, h, Shell } from "./shell.js";
import { unpackBlock } from "./columns.js";
import { Pane } from "./pane.js";
import { Table } from "./table.js";
import { Tokens } from "./tokens.js";

export default {
  render(context) {
    return new Shell(context, "RowDiff").run(buildDiff);
  },
};

/** Token i of one side (0 or 1) -> the token that stands against it on the other, by equal stretches. */
function counterpart(stretches, side, i) {
  const here = side ? stretches.other : stretches.one, there = side ? stretches.one : stretches.other;
  let low = 0, high = here.length - 1, found = -1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (here[middle] <= i) { found = middle; low = middle + 1; } else high = middle - 1;
  }
  if (found < 0) return i;
  return there[found] + Math.min(i - here[found], stretches.length[found]);
}

/** 1 for every token that is in no equal stretch. */
function ownTokens(stretches, side, n) {
  const own = new Uint8Array(n).fill(1);
  const starts = side ? stretches.other : stretches.one;
  for (let k = 0; k < starts.length; k++) own.fill(0, starts[k], starts[k] + stretches.length[k]);
  return own;
}

function buildDiff(shell) {
  const { model } = shell;
  const title = h("div", { class: "wb-title" });
  const numbers = h("div");
  const heads = [h("div"), h("div")];
  const hosts = [h("div", {}, heads[0]), h("div", {}, heads[1])];
  const pair = h("div", { class: "wb-pair" }, ...hosts);
  const note = h("span", { class: "wb-note", role: "status" });
  const detail = [h("div", { class: "wb-note" }), h("div", { class: "wb-note" })];
  const missing = h("div", { class: "wb-missing" });
  const first = h("button", { text: "first diverging id" });
  const next = h("button", { text: "next difference (d)" });
  const menu = h("select", { "aria-label": "colour by" });
  const search = h("input", { placeholder: "/ find text", "aria-label": "find", title: "find text in A, then in B" });
  const panes = hosts.map((host) => new Pane(shell, host, { rows: 13, columns: 44 }));
  const dash = (value, digits = 4) => (value === null || value === undefined ? null : Number(value).toPrecision(digits));
  const flips = new Table(shell, [
    ["task", (row) => row.task_id], ["index", (row) => String(row.index), "n"], ["A", (row) => row.rollout_id], ["B", (row) => row.rollout_id_other],
    ["reward A", (row) => dash(row.reward, 3), "n"], ["reward B", (row) => dash(row.reward_other, 3), "n"], ["what flipped", (row) => row.what],
  ], { page: 8, onRow: (k) => { const row = flips.rows[k]; note.textContent = "reading both rows …"; shell.send("chosen", [row.rollout_id, row.rollout_id_other]); } });
  let stretches = null, firstAt = null, leading = null;

  async function load() {
    shell.idle = true;
    title.textContent = model.get("sentence");
    missing.textContent = model.get("missing");
    pair.hidden = Boolean(model.get("missing"));
    if (pair.hidden) return;
    const [block, one, other] = await Promise.all([unpackBlock(model.get("block")), Tokens.from(model.get("one")), Tokens.from(model.get("other"))]);
    stretches = block.columns;
    firstAt = block.words.first;
    for (const [side, tokens] of [one, other].entries()) {
      const head = model.get("heads")[side];
      heads[side].replaceChildren(h("div", { class: "wb-title", text: `${"AB"[side]} ${head.name} · ${count(tokens.n, "token")}` }), custodyLine(head.custody));
      panes[side].differs = ownTokens(stretches, side, tokens.n);
      panes[side].show(tokens);
    }
    menu.replaceChildren(...one.signals.map(([key, label, reason], k) => {
      const why = reason ?? other.signals[k][2];
      return h("option", { value: key, disabled: why !== null, text: why === null ? label : `${label}: ${why}` });
    }));
    menu.value = "mask";
    colour();
    first.disabled = next.disabled = firstAt === null;
    note.textContent = firstAt === null ? "the rows are equal, id for id" : `first diverging id: ${firstAt.toLocaleString("en-US")}`;
    shell.idle = false;
    lock(firstAt ?? 0, firstAt ?? 0);
  }

  function colour() {
    for (const pane of panes) pane.colourBy(menu.value);
  }

  function lock(one, other) {
    leading = "jump";
    panes[0].go(one);
    panes[1].go(other);
    requestAnimationFrame(() => { leading = null; });
  }

  function nextDifference() {
    const starts = stretches.one, from = panes[0].cursor, fromOther = panes[1].cursor;
    for (let k = 0; k < starts.length; k++) {
      const one = starts[k] + stretches.length[k], other = stretches.other[k] + stretches.length[k];
      const within = one < panes[0].tokens.n || other < panes[1].tokens.n;
      if (within && (one > from || (one === from && other > fromOther))) {
        note.textContent = `difference at ${one.toLocaleString("en-US")} in A, ${other.toLocaleString("en-US")} in B`;
        return lock(one, other);
      }
    }
    note.textContent = "no further difference; from the first again";
    lock(firstAt, firstAt);
  }

  function seek() {
    note.textContent = "";
    if (!search.value) return;
    for (const [side, pane] of panes.entries()) {
      const hits = pane.tokens.find(search.value);
      pane.found = new Set(hits);
      const i = hits.find((at) => at > pane.cursor) ?? hits[0];
      if (i !== undefined) {
        note.textContent = `found ${hits.length.toLocaleString("en-US")} times in ${"AB"[side]}`;
        return side ? lock(counterpart(stretches, 1, i), i) : lock(i, counterpart(stretches, 0, i));
      }
    }
    note.textContent = `“${search.value}” does not occur`;
  }

  for (const [side, pane] of panes.entries()) {
    pane.onCursor = (i) => { detail[side].textContent = `${"AB"[side]}: ${pane.tokens.describe(i)}`; };
    pane.onScroll = (top) => {
      if (leading !== null && leading !== side) return;
      leading = side;
      panes[1 - side].scrollToToken(counterpart(stretches, side, top));
      requestAnimationFrame(() => requestAnimationFrame(() => { if (leading === side) leading = null; }));
    };
  }
  const both = (fn) => () => { fn(panes[0]); panes[1].go(counterpart(stretches, 0, panes[0].cursor)); };
  const arms = model.get("arms");
  if (arms && arms.differences) {
    const table = new Table(shell, [
      ["metric", (row) => row.metric], ["pairs", (row) => String(row.pairs), "n"], ["A", (row) => dash(row.one), "n"], ["B", (row) => dash(row.other), "n"],
      ["B − A", (row) => dash(row.mean), "n"],
      ["95 % interval", (row) => (row.low === null ? (row.mean === null ? null : "one task: no interval") : `[${dash(row.low, 3)}, ${dash(row.high, 3)}]`)],
      ["what it is", (row) => row.meaning],
    ]);
    table.show(arms.differences);
    const [left, right] = arms.unpaired;
    numbers.append(table.node, h("div", { class: "wb-note", text: `${count(arms.pairs, "pair")} by task and seed; without a partner: ${left} of A, ${right} of B` }));
    if (arms.flips.length) numbers.append(h("div", { class: "wb-title", text: `${count(arms.all_flips, "pair")} whose verdict flips (choose one)` }), flips.node);
    else numbers.append(h("div", { class: "wb-note", text: "no pair changes its verdict" }));
    flips.show(arms.flips, arms.all_flips);
  }
  shell.body.append(title, numbers, h("div", { class: "wb-bar" }, h("label", {}, "colour by ", menu), search, first, next, note), missing, pair, ...detail,
    h("div", { class: "wb-legend" }, h("span", {}, h("i", { style: "border-top:2px dotted var(--wb-bad)" }), "id only on this side"),
      h("span", {}, h("i", { style: "border-bottom:2px solid var(--wb-orange)" }), "sampled by the policy"), h("span", { text: "both strips scroll together" }), h("span", { text: "? keys" })));
  shell.listen(menu, "change", colour);
  shell.listen(first, "click", () => lock(firstAt, firstAt));
  shell.listen(next, "click", nextDifference);
  shell.listen(search, "keydown", (event) => { if (event.key === "Enter") seek(); });
  shell.bind([
    ["j", "next line", both((pane) => pane.moveLine(1))],
    ["k", "previous line", both((pane) => pane.moveLine(-1))],
    ["n", "next call", both((pane) => pane.moveCall(1))],
    ["p", "previous call", both((pane) => pane.moveCall(-1))],
    ["]", "next flip", () => flips.move(1)],
    ["[", "previous flip", () => flips.move(-1)],
    ["d", "next difference", nextDifference],
    ["/", "find", () => search.focus()],
  ]);
  shell.watch("block", load);
  shell.watch("missing", load);
  shell.watchLook(() => { for (const pane of panes) pane.relayout(); });
  return load();
}
