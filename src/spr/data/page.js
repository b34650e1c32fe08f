"use strict";
// Tables sort by a click on a column's head: numbers from high to low first, words from A to Z; empty cells stay last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const place = head.cellIndex;
    const numeric = !head.classList.contains("text");
    const before = head.getAttribute("aria-sort");
    const up = before ? before === "descending" : !numeric;
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[place].dataset.value;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
      return up ? order : -order;
    });
    body.append(...rows);
  });
}
