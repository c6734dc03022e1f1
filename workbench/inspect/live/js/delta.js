// delta.js: the live LogprobDelta. Distribution, difference by place, what the detectors say, and the worst tokens.

import { count, h, Shell } from "./shell.js";
import { plot, shape } from "./plot.js";
import { Table } from "./table.js";

export default {
  render(context) {
    return new Shell(context, "LogprobDelta").run(buildDelta);
  },
};

function buildDelta(shell) {
  const { model } = shell;
  const menu = h("select", { "aria-label": "tokens of" });
  const search = h("input", { placeholder: "/ text or rollout", "aria-label": "filter the tokens", title: "filter the tokens by text or rollout" });
  const note = h("span", { class: "wb-note", role: "status" });
  const pictures = h("div", { class: "wb-pair" });
  const said = h("div");
  const numbers = h("div", { class: "wb-grid" });
  const fixed = (name, digits = 3) => (row) => (row[name] === null || row[name] === undefined ? null : row[name].toFixed(digits));
  const worst = new Table(shell, [
    ["Δ", fixed("delta"), "n"], ["sampler", fixed("logprob"), "n"], ["trainer", fixed("trainer_logprob"), "n"], ["rollout", (row) => row.rollout_id],
    ["token", (row) => row.position.toLocaleString("en-US"), "n"], ["text", (row) => row.text, "mono"], ["before it", (row) => row.before, "mono"],
  ], { page: 10, onRow: (k) => shell.send("chosen", model.get("worst").indexOf(worst.rows[k])) });
  let part = 0;

  function drawPart() {
    const { name, numbers: n, counts, at, mean_abs: means } = model.get("parts")[part];
    const edges = model.get("edges");
    const tile = (words, value) => h("div", { class: "wb-tile" }, h("b", { text: value }), h("span", { text: words }));
    numbers.replaceChildren(
      tile(`sampled tokens (${name})`, n.tokens.toLocaleString("en-US")), tile("mean |Δ|, nat", n.mean_abs.toFixed(5)), tile("p99 |Δ|, nat", n.p99_abs.toFixed(4)),
      tile("largest |Δ|, nat", n.max_abs.toFixed(4)), tile("token_mult_prob_error", n.token_mult_prob_error.toFixed(5)), tile("gen_kl_error, nat", n.gen_kl_error.toFixed(5)));
    pictures.replaceChildren(spread(edges, counts), byPlace(at, means));
  }

  function spread(edges, counts) {
    const limit = edges[edges.length - 1], most = Math.max(1, ...counts), top = (k) => Math.log1p(k) / Math.log1p(most);
    const { node, x, y } = plot("Δ = trainer − sampler, nat; dashed: mean; the ends gather the rest", [-limit, limit], [0, 1], { ticksY: [[1, most.toLocaleString("en-US")], [0, "0"]] });
    counts.forEach((tokens, k) => {
      const left = x(edges[k]), width = x(edges[k + 1]) - left, below = edges[k] + edges[k + 1] < 0;
      const bar = shape("rect", { x: left, y: y(top(tokens)), width: Math.max(0.5, width - 0.6), height: y(0) - y(top(tokens)), fill: below ? "var(--wb-blue)" : "var(--wb-orange)" });
      bar.append(shape("title", {}, `${edges[k].toFixed(4)} to ${edges[k + 1].toFixed(4)}: ${count(tokens, "token")}`));
      node.append(bar);
    });
    const mean = Math.min(limit, Math.max(-limit, model.get("parts")[part].numbers.mean));
    node.append(shape("path", { d: `M${x(mean)} ${y(0)}V${y(1)}`, stroke: "var(--wb-ink)", "stroke-dasharray": "4 3" }),
      shape("text", { x: 46, y: 38 }, "height: log of the number of tokens"));
    node.append(shape("text", { x: 46, y: 24 }, "← trainer less likely"), shape("text", { x: 452, y: 24, "text-anchor": "end" }, "trainer more likely →"));
    return node;
  }

  function byPlace(at, means) {
    const most = Math.max(1e-9, ...model.get("parts").flatMap((one) => one.mean_abs));
    const { node, x, y } = plot("mean |Δ| (nat) by sampled token of the row", [0, Math.max(1, ...at) * 1.06], [0, most], { whole: true });
    const line = (points, look) => node.append(shape("polyline", { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), fill: "none", ...look }));
    const all = model.get("parts")[0];
    if (part) line(all.at.map((a, k) => [a, all.mean_abs[k]]), { stroke: "var(--wb-muted)", "stroke-dasharray": "4 3" });
    line(at.map((a, k) => [a, means[k]]), { stroke: "var(--wb-blue)", "stroke-width": 2.4 });
    at.forEach((a, k) => node.append(shape("circle", { cx: x(a), cy: y(means[k]), r: 3.5, fill: "var(--wb-blue)" })));
    return node;
  }

  function filter() {
    const needle = search.value.trim().toLowerCase();
    const rows = model.get("worst").filter((row) => `${row.text} ${row.before} ${row.rollout_id}`.toLowerCase().includes(needle));
    worst.at = -1;
    worst.show(rows, needle ? rows.length : model.get("parts")[0].numbers.tokens);
    note.textContent = needle ? `${count(rows.length, "token")} of the ${model.get("worst").length} worst match` : "";
  }

  function choosePart(index) {
    const { length } = model.get("parts");
    part = (index + length) % length;
    menu.value = String(part);
    drawPart();
  }

  shell.body.append(h("div", { class: "wb-title", text: model.get("sentence") }));
  if (model.get("missing")) {
    shell.body.append(h("div", { class: "wb-missing", text: model.get("missing") }));
    return;
  }
  for (const finding of model.get("findings")) {
    const mark = { clear: "✓", found: "✗", unknown: "?" }[finding.state];
    said.append(h("div", { class: { clear: "", found: "wb-bad", unknown: "wb-missing" }[finding.state] }, h("b", { text: `${mark} ${finding.name}: ` }), finding.words));
  }
  menu.append(...model.get("parts").map((one, k) => h("option", { value: k, text: `${one.name} (${count(one.numbers.tokens, "token")})` })));
  shell.body.append(said, h("div", { class: "wb-bar" }, h("label", {}, "tokens of ", menu), search, note), numbers, pictures,
    h("div", { class: "wb-title", text: "Where they disagree most (choose one to see it in its text)" }), worst.node, h("div", { class: "wb-legend" }, "? keys"));
  shell.listen(menu, "change", () => choosePart(Number(menu.value)));
  shell.listen(search, "input", filter);
  shell.bind([
    ["j", "next token in the table", () => worst.move(1)],
    ["k", "previous token in the table", () => worst.move(-1)],
    ["d", "next worst token", () => worst.move(1)],
    ["n", "next page of tokens", () => worst.turn(1)],
    ["p", "previous page of tokens", () => worst.turn(-1)],
    ["]", "next of these", () => choosePart(part + 1)],
    ["[", "previous of these", () => choosePart(part - 1)],
    ["/", "filter the tokens", () => search.focus()],
  ]);
  choosePart(0);
  filter();
}
