// poison.js: the live PoisonTable. Causes, where in the campaign they came, and every rejected rollout behind them.

import { count, h, Shell } from "./shell.js";
import { Table } from "./table.js";

export default {
  render(context) {
    return new Shell(context, "PoisonTable").run(buildPoison);
  },
};

function buildPoison(shell) {
  const { model } = shell;
  const search = h("input", { placeholder: "/ id, step or detail", "aria-label": "find a rollout", title: "find a rollout by id, step or detail" });
  const note = h("span", { class: "wb-note", role: "status" });
  const meaning = h("div", { class: "wb-detail" });
  const which = h("div", { class: "wb-title" });
  const most = Math.max(1, ...model.get("by_step").map((row) => row.rollouts));
  let cause = null;

  const strip = (row) => h("span", { title: "by optimiser step; height: rollouts" }, ...spark(row.cause));
  const causes = new Table(shell, [
    ["cause", (row) => row.cause], ["rollouts", (row) => row.rollouts.toLocaleString("en-US"), "n"], ["share", (row) => `${(100 * row.share).toFixed(1)} %`, "n"],
    ["", (row) => h("span", { class: "wb-fill bad", style: `width:${Math.max(2, 90 * row.share)}px` })], ["over steps", strip],
    ["what it means", (row) => row.meaning],
  ], { page: 8, onRow: (k) => chooseCause(causes.rows[k].cause) });
  const rollouts = new Table(shell, [
    ["rollout", (row) => row.rollout_id], ["step", (row) => (row.step === null ? null : String(row.step)), "n"], ["where", (row) => row.where],
    ["detail", (row) => row.detail], ["nearest call", (row) => row.near_call_id && row.near_call_id.slice(0, 8)],
    ["what differs", (row) => row.drift],
  ], { page: 8, onRow: (k) => shell.send("chosen", rollouts.rows[k].rollout_id) });
  const drift = new Table(shell, [
    ["drift", (row) => row.cause], ["rollout", (row) => row.rollout_id], ["call", (row) => row.model_call_id.slice(0, 8)],
    ["nearly continues", (row) => row.near_call_id && row.near_call_id.slice(0, 8)], ["item (from 0)", (row) => (row.near_item === null ? null : String(row.near_item)), "n"],
    ["where", (row) => row.near_path], ["was", (row) => row.near_was, "mono"], ["came", (row) => row.near_came, "mono"],
    ["first token", (row) => (row.token_position === null ? null : `${row.token_position} (id ${row.token_id})`)],
  ], { page: 6, onRow: (k) => shell.send("chosen", drift.rows[k].rollout_id) });
  const failures = new Table(shell, [
    ["reason", (row) => row.failure_reason], ["detail", (row) => row.detail], ["calls", (row) => String(row.calls), "n"], ["rollouts", (row) => String(row.rollouts), "n"],
    ["what it means", (row) => row.meaning], ["for instance", (row) => row.example],
  ], { page: 6, onRow: (k) => shell.send("chosen", failures.rows[k].example) });
  const refused = new Table(shell, [
    ["refused as", (row) => `${row.status} ${row.code}`], ["requests", (row) => row.requests.toLocaleString("en-US"), "n"],
    ["rollouts", (row) => String(row.rollouts), "n"], ["for instance", (row) => row.example], ["what it was told first", (row) => row.message],
  ], { page: 6 });

  /** One bar a step (at most 40 ranges of steps); the number is in its title. */
  function spark(name) {
    const steps = model.get("steps");
    const size = Math.max(1, Math.ceil(steps.length / 40));
    const bars = [];
    for (let k = 0; k < steps.length; k += size) {
      const range = steps.slice(k, k + size);
      const rows = model.get("by_step").filter((row) => row.cause === name && range.includes(row.step));
      const total = rows.reduce((sum, row) => sum + row.rollouts, 0);
      bars.push(h("span", {
        class: "wb-fill bad", title: `step ${range[0]}${range.length > 1 ? ` to ${range[range.length - 1]}` : ""}: ${total}`,
        style: `width:6px;margin-right:1px;height:${total ? 3 + (13 * total) / (most * size) : 1}px`,
      }));
    }
    return bars;
  }

  function chooseCause(name) {
    cause = name;
    meaning.textContent = name ? `${name}: ${model.get("causes").find((row) => row.cause === name).meaning}` : "choose a cause to see its rollouts alone";
    filter();
  }

  function filter() {
    const needle = search.value.trim().toLowerCase();
    const all = model.get("rollouts").filter((row) => (!cause || row.cause === cause)
      && `${row.rollout_id} ${row.step} ${row.detail} ${row.drift} ${row.cause}`.toLowerCase().includes(needle));
    rollouts.at = -1;
    const known = model.get("causes").find((row) => row.cause === cause);
    const whole = needle ? all.length : cause ? known.rollouts : model.get("total");
    which.textContent = `${count(whole, "rejected rollout")}${cause ? ` for ${cause}` : ""} (choose one to see its calls)`;
    rollouts.show(all, whole);
  }

  shell.body.append(h("div", { class: "wb-title", text: model.get("sentence") }));
  causes.show(model.get("causes"));
  drift.show(model.get("drift"));
  failures.show(model.get("failures"));
  refused.show(model.get("refused"));
  if (model.get("causes").length) shell.body.append(causes.node, meaning, h("div", { class: "wb-bar" }, search, note), which, rollouts.node);
  if (model.get("refused").length) shell.body.append(h("div", { class: "wb-title", text: model.get("refused_words") }), refused.node);
  if (model.get("drift").length) shell.body.append(h("div", { class: "wb-title", text: "Requests that continued no recorded call" }), drift.node);
  if (model.get("failures").length) shell.body.append(h("div", { class: "wb-title", text: "Calls that left no tokens (they reject a rollout only where the terminal chain needs them)" }), failures.node);
  shell.body.append(h("div", { class: "wb-legend" }, h("span", { text: "hatched bar: share of all rollouts" }), h("span", { text: "? keys" })));
  shell.listen(search, "input", filter);
  shell.model.on("msg:custom", shell.guard((message) => { note.textContent = message.note ?? ""; }));
  chooseCause(null);
  shell.bind([
    ["j", "next cause", () => causes.move(1)],
    ["k", "previous cause", () => causes.move(-1)],
    ["n", "next rejected rollout", () => rollouts.move(1)],
    ["p", "previous rejected rollout", () => rollouts.move(-1)],
    ["]", "next unresolved call", () => drift.move(1)],
    ["[", "previous unresolved call", () => drift.move(-1)],
    ["d", "next call that left no tokens", () => failures.move(1)],
    ["/", "find a rollout", () => search.focus()],
  ]);
}
