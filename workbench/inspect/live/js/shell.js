// shell.js: what every live view has. A frame that takes the keyboard, a help panel, and one line for errors.
// Text is always set as text, never as markup; keys are kept from the notebook while the frame has the focus.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") node.append(...kept(String(value)));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Text as nodes; a browser would break a line behind each bar of |Δ|. */
function kept(text) {
  return text.split(/(\|Δ\|)/).filter(Boolean).map((part) => {
    if (part !== "|Δ|") return part;
    const whole = document.createElement("span");
    whole.style.whiteSpace = "nowrap";
    whole.textContent = part;
    return whole;
  });
}

const KEY_NAMES = { ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };

export class Shell {
  constructor({ model, el }, name) {
    this.model = model;
    this.undo = [];
    this.keys = [];
    this.idle = false;
    this.body = h("div", { class: "wb-body" });
    // `idle`: there is nothing to move in, so keys other than ? do nothing.
    this.help = h("div", { class: "wb-help", hidden: true });
    this.error = h("div", { class: "wb-error", role: "alert", hidden: true });
    this.root = h("div", {
      class: "wb", tabindex: "0", role: "region", "aria-label": name, "data-wb": name,
      "data-lm-suppress-shortcuts": "true",
    }, this.body, this.help, this.error);
    el.append(this.root);
    this.listen(this.root, "keydown", (event) => this.#press(event));
    this.bind([
      ["?", "this help", () => this.#toggleHelp()],
      ["Escape", "close this help; leave the search field", () => { this.help.hidden = true; }],
    ]);
    this.#foldSnapshot(el);
  }

  /** `fn` whose exceptions, and those of the promise it returns, end as one line in the view. */
  guard(fn) {
    return (...args) => {
      try {
        const out = fn(...args);
        if (out && typeof out.catch === "function") out.catch((problem) => this.fail(problem));
        return out;
      } catch (problem) {
        this.fail(problem);
      }
    };
  }

  fail(problem) {
    this.error.textContent =
      `The live view failed: ${problem && problem.message ? problem.message : problem}. .snapshot() shows the same without it.`;
    this.error.hidden = false;
    console.error(problem);
  }

  listen(target, type, fn, options) {
    const guarded = this.guard(fn);
    target.addEventListener(type, guarded, options);
    this.undo.push(() => target.removeEventListener(type, guarded, options));
  }

  watch(trait, fn) {
    const guarded = this.guard(fn);
    this.model.on(`change:${trait}`, guarded);
    this.undo.push(() => this.model.off(`change:${trait}`, guarded));
  }

  /** Calls `fn` when the frame's size or the page's theme changes, and when the frame comes into sight: notebooks take
   *  cells that are out of sight off the page, where nothing has a width and nothing can be drawn. */
  watchLook(fn) {
    const guarded = this.guard(() => { if (this.root.clientWidth) fn(); });
    const sizes = new ResizeObserver(() => guarded());
    sizes.observe(this.root);
    const sight = new IntersectionObserver(() => guarded());
    sight.observe(this.root);
    const themes = new MutationObserver(() => guarded());
    themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    this.undo.push(() => { sizes.disconnect(); sight.disconnect(); themes.disconnect(); });
  }

  /** `table`: [key, what it does, function]. */
  bind(table) {
    this.keys = [...table, ...this.keys];
    this.help.replaceChildren(...this.keys.map(([key, words]) => h("div", {}, h("kbd", { text: KEY_NAMES[key] ?? key }), words)));
  }

  /** Builds the view; `data-wb-ready` on the frame says when what it was given, or the error, is on the screen. */
  run(build) {
    const shown = this.guard(build)(this);
    const ready = () => this.root.setAttribute("data-wb-ready", "");
    Promise.resolve(shown).then(ready, ready);
    return () => this.close();
  }

  send(trait, value) {
    this.model.set(trait, value);
    this.model.save_changes();
  }

  close() {
    for (const undo of this.undo.splice(0).reverse()) undo();
    this.root.remove();
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (typing) {
      if (event.key === "Escape") this.root.focus();
      return;
    }
    const bound = this.keys.find(([key]) => key === event.key);
    if (!bound || (this.idle && event.key !== "?" && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    bound[2]();
  }

  #toggleHelp() {
    this.help.hidden = !this.help.hidden;
  }

  #foldSnapshot(el) {
    const fallbacks = this.model.get("fallbacks");
    if (!fallbacks) return;
    // A view is made before it is put on the page, so its place among the outputs is known only once it has a size.
    const placed = new ResizeObserver(() => {
      const child = el.closest(".jp-OutputArea-child");
      if (!child) return;
      placed.disconnect();
      child.setAttribute("data-wb-live", String(fallbacks));
      this.undo.push(() => child.removeAttribute("data-wb-live"));
    });
    placed.observe(this.root);
    this.undo.push(() => placed.disconnect());
  }
}

export function custodyLine(custody) {
  const line = h("div", { class: `wb-custody ${custody.state}` }, h("b", { text: custody.words }));
  if (custody.digest) line.append(` · digest ${custody.digest}`);
  if (custody.meaning) line.append(h("div", { text: custody.meaning }));
  return line;
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en-US")} ${number === 1 ? one : many}`;
}
