// strip.js: the live TokenStrip. A menu of signals, jumps and a search over one pane.

import { custodyLine, h, Shell } from "./shell.js";
import { Pane } from "./pane.js";
import { Tokens } from "./tokens.js";

export default {
  render(context) {
    return new Shell(context, "TokenStrip").run(buildStrip);
  },
};

function buildStrip(shell) {
  const { model } = shell;
  const title = h("div", { class: "wb-title" });
  const custody = h("div");
  const menu = h("select", { title: "what the colours mean", "aria-label": "colour by" });
  const search = h("input", { placeholder: "/ text, #8, id:42, call:3", "aria-label": "find", title: "find text, a token by its position (#8) or id (id:42), a call (call:3)" });
  const note = h("span", { class: "wb-note", role: "status" });
  const detail = h("div", { class: "wb-detail" });
  const host = h("div");
  const legend = h("div", { class: "wb-legend" });
  const buttons = {};
  const bar = h("div", { class: "wb-bar" }, h("label", {}, "colour by ", menu), search);
  const pane = new Pane(shell, host);
  let tokens = null, hits = [], hit = -1, rank = -1;

  const jump = (key, words, title, fn) => {
    buttons[key] = h("button", { text: words, title });
    shell.listen(buttons[key], "click", fn);
    bar.append(buttons[key]);
  };
  const goOrSay = (i, missing) => (i < 0 ? (note.textContent = missing) : pane.go(i));
  jump("first", "first sampled", "the first token that the policy sampled", () => goOrSay(tokens.next(0, (i) => tokens.sampled(i)), "nothing here was sampled"));
  jump("worst", "largest |Δ|", "where trainer and sampler disagree most; again: the next", () => nextWorst());
  jump("masked", "next masked span", "the next tokens that were carried, not sampled (mask 0)", () => {
    const { cursor } = pane;
    goOrSay(tokens.next(cursor + 1, (i) => i > 0 && !tokens.sampled(i) && tokens.sampled(i - 1)), "no masked span follows a sampled one");
  });
  jump("flag", "next control id", "a control id where a text should be, such as a literal <|im_end|> of a user", () => goOrSay(tokens.next(pane.cursor + 1, (i) => (tokens.flags[i] & 2) > 0), "no control id stands inside content"));
  bar.append(note);

  function nextWorst() {
    const worst = tokens.worst();
    if (!worst.length) { note.textContent = "the trainer has not scored these tokens"; return; }
    rank = (rank + 1) % worst.length;
    note.textContent = `|Δ| number ${rank + 1} of ${worst.length.toLocaleString("en-US")}`;
    pane.go(worst[rank]);
  }

  function nextFound(by) {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    note.textContent = `${hit + 1} of ${hits.length.toLocaleString("en-US")} found`;
    pane.go(hits[hit]);
  }

  function seek(query) {
    hits = [];
    hit = -1;
    pane.found = new Set();
    const [, kind, rest] = query.match(/^(#|id:|call:)?(.*)$/s);
    if (kind === "#") return pane.go(Number(rest) || 0);
    if (kind === "call:") {
      const at = tokens.calls.findIndex(([, id, , , order]) => `${order}` === rest.replace("#", "") || (rest && id && id.startsWith(rest)));
      return at < 0 ? (note.textContent = `this row has no call ${rest}`) : pane.go(tokens.calls[at][0]);
    }
    if (kind === "id:") {
      for (let i = 0; i < tokens.n && hits.length < 10000; i++) if (`${tokens.id(i)}` === rest) hits.push(i);
    } else if (query) hits = tokens.find(query);
    pane.found = new Set(hits);
    if (hits.length) nextFound(1);
    else { note.textContent = query ? `“${query}” does not occur` : ""; pane.draw(); }
  }

  async function load() {
    const view = model.get("block");
    const words = model.get("missing");
    shell.idle = true;
    host.hidden = bar.hidden = legend.hidden = !view || !view.byteLength;
    title.textContent = model.get("sentence");
    custody.replaceChildren(custodyLine(model.get("custody")));
    if (host.hidden) { detail.textContent = words; detail.className = "wb-detail wb-missing"; return; }
    detail.className = "wb-detail";
    tokens = await Tokens.from(view);
    rank = -1;
    menu.replaceChildren(...tokens.signals.map(([key, label, reason]) =>
      h("option", { value: key, disabled: reason !== null, text: reason === null ? label : `${label}: ${reason}` })));
    const free = tokens.signals.filter(([, , reason]) => reason === null).map(([key]) => key);
    if (!free.includes(pane.signal)) pane.signal = free[0];
    menu.value = pane.signal;
    buttons.worst.disabled = !tokens.columns.delta;
    buttons.flag.disabled = !tokens.flagged;
    buttons.flag.textContent = tokens.flagged ? `next control id (${tokens.flagged})` : "no stray control id";
    pane.show(tokens);
    explain();
    const at = model.get("at");
    shell.idle = false;
    pane.go(at >= 0 ? at : 0);
  }

  function explain() {
    const mark = (look, words) => h("span", {}, h("i", { style: look }), words);
    const hatch = "background:repeating-linear-gradient(135deg,transparent 0 4px,var(--wb-carry) 4px 7px)";
    const said = [mark("border-bottom:2px solid var(--wb-orange)", "sampled by the policy"), mark("outline:1px solid var(--wb-muted)", "special token")];
    const signal = pane.signal;
    if (signal === "mask") said.push(mark(hatch, "carried, mask 0"));
    if (signal === "agreement") said.push(h("span", { text: "bright and thick bar: the trainer's own routers would choose other experts" }));
    if (signal === "role") said.push(h("span", { text: "left of each line: the first letter of its role, ▁ sampled" }));
    if (signal === "logprob" || signal === "trainer") said.push(h("span", { text: `bright and thick bar: unlikely (full at ${tokens.scale(signal).toFixed(2)} nat)` }));
    if (["delta", "ratio", "advantage"].includes(signal)) {
      said.push(mark("background:rgba(31,95,168,.7)", "below"), mark("background:rgba(232,135,43,.7)", "above"),
        h("span", { text: `bar: size (full at ±${tokens.scale(signal).toPrecision(3)})` }));
    }
    const shown = `${tokens.n.toLocaleString("en-US")} of ${tokens.n.toLocaleString("en-US")} tokens at hand`;
    legend.replaceChildren(...said, h("span", { text: tokens.decoded ? shown : `${shown}; no vocabulary: ids are shown, not text` }), h("span", { text: "? keys" }));
  }

  pane.onCursor = (i) => {
    detail.textContent = tokens.describe(i);
    if (model.get("at") !== i) { model.set("at", i); model.save_changes(); }
  };
  shell.body.append(title, custody, bar, host, detail, legend);
  shell.listen(menu, "change", () => { pane.colourBy(menu.value); explain(); });
  shell.listen(search, "keydown", (event) => {
    if (event.key !== "Enter") return;
    if (hits.length && search.dataset.sought === search.value) nextFound(event.shiftKey ? -1 : 1);
    else { search.dataset.sought = search.value; seek(search.value); }
  });
  shell.bind([
    ["j", "next line", () => pane.moveLine(1)],
    ["k", "previous line", () => pane.moveLine(-1)],
    ["n", "next call", () => pane.moveCall(1)],
    ["p", "previous call", () => pane.moveCall(-1)],
    ["]", "next change of the mask", () => pane.moveSpan(1)],
    ["[", "previous change of the mask", () => pane.moveSpan(-1)],
    ["d", "next largest |Δ|", () => nextWorst()],
    ["/", "find (Enter: next, Shift+Enter: previous)", () => search.focus()],
    ["ArrowRight", "next token", () => pane.go(pane.cursor + 1)],
    ["ArrowLeft", "previous token", () => pane.go(pane.cursor - 1)],
  ]);
  shell.watch("block", load);
  shell.watch("missing", load);
  shell.watch("at", () => { const at = model.get("at"); if (tokens && at >= 0 && at !== pane.cursor) pane.go(at); });
  shell.watchLook(() => pane.relayout());
  return load();
}
