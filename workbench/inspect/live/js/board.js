// board.js: the live CampaignBoard. Asks the kernel to read the run's files once a second while it is in sight, one
// question at a time; a run that has ended is read once more when the view is opened and then left alone.

import { count, h, Shell } from "./shell.js";
import { plot, shape } from "./plot.js";
import { Table } from "./table.js";

const EVERY_MS = 1000;
const BUSY_MS = 8000;

export default {
  render(context) {
    return new Shell(context, "CampaignBoard").run(buildBoard);
  },
};

function buildBoard(shell) {
  const { model } = shell;
  const title = h("div", { class: "wb-title" });
  const note = h("div", { class: "wb-note", role: "status" });
  const tiles = h("div", { class: "wb-grid" });
  const curves = h("div", { class: "wb-pair" });
  const phases = h("div");
  const rejection = h("div", { class: "wb-missing" });
  const problem = h("div");
  const damaged = h("div", { class: "wb-bad" });
  const flying = new Table(shell, [
    ["group in flight", (row) => row.group], ["step", (row) => String(row.step ?? "–"), "n"], ["rollouts", (row) => String(row.rollouts), "n"],
    ["first rollout", (row) => row.rollout], ["for", (row) => duration(row.age_s), "n"],
  ], { page: 6 });
  const causes = new Table(shell, [
    ["rejected for", (row) => row.cause], ["rollouts", (row) => row.rollouts.toLocaleString("en-US"), "n"],
    ["", (row) => h("span", { class: "wb-fill bad", style: `width:${Math.max(3, (120 * row.rollouts) / Math.max(1, model.get("frame").causes[0].rollouts))}px` })],
  ], { page: 6 });
  const calls = new Table(shell, [["call", (row) => row.how], ["calls", (row) => row.calls.toLocaleString("en-US"), "n"]], { page: 12 });
  const names = ["reward_mean", "token_in_rate_after_roots", "valid_row_rate", "staleness_max"];
  const words = { reward_mean: "reward by step", token_in_rate_after_roots: "token_in_rate after roots, by step", valid_row_rate: "valid rows / rows", staleness_max: "staleness (versions)" };
  let asked = 0, answered = 0, first = 0, timer = null;

  function show() {
    const frame = model.get("frame");
    title.textContent = model.get("sentence");
    tiles.replaceChildren(...frame.tiles.map((tile) => h("div", { class: `wb-tile${tile.value === null ? " missing" : ""}` },
      h("b", { text: tile.value === null ? `– ${tile.why}` : tile.value }), h("span", { text: tile.label }))));
    curves.replaceChildren(...[names[first % names.length], names[(first + 1) % names.length]].map((name) => curve(frame.series, name)));
    phases.replaceChildren(phaseBar(frame.series));
    curves.hidden = phases.hidden = frame.what === "served";
    calls.node.hidden = !frame.calls.length;
    calls.show(frame.calls);
    flying.node.hidden = !frame.flying.length;
    flying.show(frame.flying, frame.in_flight);
    causes.node.hidden = !frame.causes.length;
    causes.show(frame.causes);
    rejection.textContent = frame.rejection ? `last rejection: ${frame.rejection}` : "";
    problem.className = frame.error ? "wb-bad" : "wb-missing";
    problem.textContent = `last error: ${frame.error ?? "none"}`;
    const { damage } = frame;
    damaged.textContent = damage.length
      ? `left out, ${count(damage.length, "line")} that cannot be read: ${damage.slice(0, 3).join("; ")}${damage.length > 3 ? `; and ${damage.length - 3} more` : ""}` : "";
    if (frame.state !== "running") note.textContent = frame.what === "ledger" ? frame.ended : `${frame.ended}; this is its last frame`;
  }

  function noStep() { return model.get("frame").no_step; }

  function curve(series, name) {
    const steps = series.step ?? [];
    if (!steps.length) return h("div", { class: "wb-missing", text: `${words[name]}: ${noStep()}` });
    const known = steps.map((step, k) => [step, series[name][k]]).filter(([, value]) => value !== null);
    if (!known.length) return h("div", { class: "wb-missing", text: `${words[name]}: no step has one` });
    const values = known.map(([, value]) => value);
    const { node, x, y } = plot(words[name], [steps[0], Math.max(steps[0] + 1, steps[steps.length - 1])], [Math.min(0, ...values), Math.max(1e-9, ...values)], { height: 150, whole: true });
    node.append(shape("polyline", { points: known.map(([step, value]) => `${x(step)},${y(value)}`).join(" "), fill: "none", stroke: "var(--wb-blue)", "stroke-width": 2.2 }));
    for (const [step, value] of known.slice(-60)) {
      const dot = shape("circle", { cx: x(step), cy: y(value), r: 3, fill: "var(--wb-blue)" });
      dot.append(shape("title", {}, `step ${step}: ${value}`));
      node.append(dot);
    }
    return node;
  }

  /** Where the last step's time went: widths in proportion, the seconds written in. */
  function phaseBar(series) {
    const parts = ["rollout_s", "train_s", "publish_s", "sync_s"].map((name) => [name, (series[name] ?? []).at(-1)]).filter(([, value]) => typeof value === "number");
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    if (!total) return h("div", { class: "wb-missing", text: `phases: ${noStep()}` });
    return h("div", { class: "wb-legend" }, h("span", { text: "last step:" }), ...parts.map(([name, value]) =>
      h("span", {}, h("span", { class: "wb-fill", style: `width:${Math.max(2, (300 * value) / total)}px;margin-right:4px` }), `${name.replace("_s", "")} ${value.toFixed(1)} s`)));
  }

  function ask() {
    const now = Date.now();
    if (asked > answered) {
      if (now - asked > BUSY_MS) note.textContent = "the kernel is busy or gone; this is the last frame it sent";
      if (now - asked < 30000) return;
    }
    asked = now;
    model.send({ kind: "read" });
  }

  shell.listen(document, "visibilitychange", () => { if (!document.hidden) ask(); });
  const onMessage = shell.guard((message) => {
    if (message.kind !== "done") return;
    answered = Date.now();
    if (model.get("frame").state === "running") note.textContent = message.note || "read from the run's files just now";
    else if (message.note) note.textContent = message.note;
  });
  model.on("msg:custom", onMessage);
  timer = setInterval(shell.guard(() => {
    if (!document.hidden && shell.root.isConnected && model.get("frame").state === "running") ask();
  }), EVERY_MS);
  shell.undo.push(() => clearInterval(timer), () => model.off("msg:custom", onMessage));
  const turn = (by) => () => { first = (first + by + names.length) % names.length; show(); };
  shell.bind([
    ["j", "next group in flight", () => flying.move(1)],
    ["k", "previous group in flight", () => flying.move(-1)],
    ["n", "next curve", turn(1)],
    ["p", "previous curve", turn(-1)],
    ["]", "next cause", () => causes.move(1)],
    ["[", "previous cause", () => causes.move(-1)],
    ["r", "read again now", ask],
  ]);
  shell.body.append(title, note, tiles, phases, curves, calls.node, flying.node, causes.node, rejection, problem, damaged,
    h("div", { class: "wb-legend" }, h("span", { text: `read from the run's files, at most ${count(2, "time")} a second` }), h("span", { text: "? keys" })));
  shell.watch("frame", show);
  show();
  ask();
}

function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}
