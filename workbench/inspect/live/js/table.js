// table.js: a table whose rows can be walked through; only one page of rows is in the document, and it says so.

import { h } from "./shell.js";

/** Characters from which a cell keeps a width of its own: squeezed, it would be a word a line. */
const PROSE = 24;

export class Table {
  /** `columns`: [heading, row -> text or node, class?]; `onRow(index)` when a row is gone to by key or click. */
  constructor(shell, columns, { page = 12, onRow = () => {} } = {}) {
    this.columns = columns;
    this.page = page;
    this.onRow = onRow;
    this.rows = [];
    this.total = 0;
    this.start = 0;
    this.at = -1;
    this.body = h("tbody");
    this.table = h("table", { class: "wb-table" },
      h("thead", {}, h("tr", {}, ...columns.map(([heading, , look]) => h("th", { text: heading, class: look ?? "" })))), this.body);
    this.note = h("span", { class: "wb-note" });
    this.before = h("button", { text: "previous", class: "wb-more" });
    this.after = h("button", { text: "more", class: "wb-more" });
    this.node = h("div", {}, h("div", { class: "wb-wide" }, this.table), h("div", { class: "wb-bar" }, this.before, this.after, this.note));
    shell.listen(this.before, "click", () => this.turn(-1));
    shell.listen(this.after, "click", () => this.turn(1));
    shell.listen(this.body, "click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) this.go(Number(row.getAttribute("data-row")));
    });
  }

  /** `total` is how many there are altogether, where not all of them were sent. */
  show(rows, total = rows.length) {
    this.rows = rows;
    this.total = total;
    this.at = Math.min(this.at, rows.length - 1);
    this.start = this.at < 0 ? 0 : Math.floor(this.at / this.page) * this.page;
    this.draw();
  }

  turn(by) {
    this.start = Math.min(Math.max(0, this.start + by * this.page), Math.max(0, this.rows.length - 1));
    this.draw();
  }

  move(by) { this.go(this.at + by); }

  go(index) {
    if (index < 0 || index >= this.rows.length) return;
    this.at = index;
    this.start = Math.floor(index / this.page) * this.page;
    this.draw();
    this.onRow(index);
  }

  draw() {
    const stop = Math.min(this.rows.length, this.start + this.page);
    this.body.replaceChildren(...this.rows.slice(this.start, stop).map((row, k) => {
      const index = this.start + k;
      return h("tr", { "data-row": index, class: index === this.at ? "at" : "" }, ...this.columns.map(([, cell, look]) => {
        const value = cell(row);
        const wide = typeof value === "string" && value.length > PROSE;
        const name = wide && !value.includes(" ");
        const parts = name ? breakable(value) : [value ?? "–"];
        return h("td", { class: `${look ?? ""}${wide && !name ? " long" : ""}` }, ...parts);
      }));
    }));
    const paged = this.rows.length > this.page;
    this.before.hidden = this.after.hidden = !paged;
    this.before.disabled = this.start === 0;
    this.after.disabled = stop >= this.rows.length;
    const rest = this.total > this.rows.length ? `; ${this.rows.length.toLocaleString("en-US")} of them are at hand` : "";
    this.note.textContent = this.total > stop - this.start
      ? `showing ${this.start + 1} to ${stop} of ${this.total.toLocaleString("en-US")}${rest}` : "";
  }
}

/** A long name as parts that may go on in a second line behind an underscore. */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, k) => (k ? [h("wbr"), part] : [part]));
}
