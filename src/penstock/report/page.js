"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Tabs: the links of the navigation show one section at a time.
  const tabs = all("nav a");
  const panels = tabs.map((tab) => document.querySelector(tab.getAttribute("href")));
  const show = (at) => {
    tabs.forEach((tab, number) => {
      tab.setAttribute("aria-selected", number === at);
      tab.tabIndex = number === at ? 0 : -1;
      panels[number].classList.toggle("shown", number === at);
    });
  };
  document.querySelector("nav").setAttribute("role", "tablist");
  tabs.forEach((tab, at) => {
    tab.id = `tab-${panels[at].id}`;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[at].id);
    panels[at].setAttribute("role", "tabpanel");
    panels[at].setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", (event) => {
      event.preventDefault();
      history.replaceState(null, "", tab.getAttribute("href"));
      show(at);
    });
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1, " ": at }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tabs[(to + tabs.length) % tabs.length].click();
      tabs[(to + tabs.length) % tabs.length].focus();
    });
  });
  for (const link of all('main a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      tabs.find((tab) => tab.getAttribute("href") === link.getAttribute("href")).click();
      scrollTo(0, 0);
    });
  }
  const named = () => Math.max(0, panels.findIndex((panel) => `#${panel.id}` === location.hash));
  addEventListener("hashchange", () => { show(named()); scrollTo(0, 0); });
  // A browser goes to the panel that the address names, past the head of the page.
  addEventListener("load", () => { if (location.hash) requestAnimationFrame(() => scrollTo(0, 0)); });
  show(named());

  // Charts: the legend shows the values that are nearest to the pointer, or that the arrow keys lead to.
  for (const chart of all("svg.chart")) {
    const legend = chart.nextElementSibling;
    const words = all("b", legend);
    const before = words.map((word) => word.textContent);
    const cursor = chart.querySelector(".cursor");
    const marks = all(".mark", chart);
    const lines = all("path.line", chart).map((path) => ({
      places: path.getAttribute("d").slice(1).split(" ").slice(0, path.dataset.at.split("|").length)
        .map((place) => place.split(",").map(Number)),
      at: path.dataset.at.split("|"),
      text: path.dataset.text.split("|"),
    }));
    const longest = lines.reduce((one, other) => (other.at.length > one.at.length ? other : one));
    const nearest = (line, x) => line.places.reduce(
      (best, place, at) => (Math.abs(place[0] - x) < Math.abs(line.places[best][0] - x) ? at : best), 0);
    let current = longest.at.length - 1;
    const read = (at) => {
      current = Math.min(Math.max(at, 0), longest.at.length - 1);
      const x = longest.places[current][0];
      chart.classList.add("reading");
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      words[0].textContent = longest.at[current];
      lines.forEach((line, number) => {
        const near = nearest(line, x);
        marks[number].setAttribute("cx", line.places[near][0]);
        marks[number].setAttribute("cy", line.places[near][1]);
        words[number + 1].textContent = line.text[near];
      });
    };
    const stop = () => {
      chart.classList.remove("reading");
      words.forEach((word, number) => { word.textContent = before[number]; });
    };
    const point = (event) => {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      read(nearest(longest, place.x));
    };
    chart.addEventListener("pointermove", point);
    chart.addEventListener("pointerdown", point);
    chart.addEventListener("pointerleave", stop);
    chart.addEventListener("blur", stop);
    chart.addEventListener("keydown", (event) => {
      const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: Infinity }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      read(to);
    });
  }

  // Kernels: a dot of the roofline and a row of the table are chosen together.
  const picked = document.querySelector(".picked");
  const choose = (kernel) => {
    for (const one of all(".chosen")) one.classList.remove("chosen");
    for (const one of all(`tr[data-kernel="${kernel}"], circle[data-kernel="${kernel}"]`)) one.classList.add("chosen");
    for (const one of all(".pick")) one.setAttribute("aria-pressed", one.dataset.kernel === kernel);
    const dot = document.querySelector(`circle[data-kernel="${kernel}"]`);
    const row = document.querySelector(`tr[data-kernel="${kernel}"]`);
    if (dot) dot.parentNode.append(dot); // above the others
    if (picked) {
      picked.textContent = dot ? dot.getAttribute("aria-label") : "This one has no dot.";
      picked.classList.add("has");
    }
    if (row) {
      const box = row.closest(".scroll");
      const head = box.querySelector("thead").offsetHeight;
      const above = row.offsetTop - head < box.scrollTop;
      const below = row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight;
      if (above || below) box.scrollTop = row.offsetTop - head;
    }
  };
  for (const dot of all("circle.dot")) {
    dot.addEventListener("click", () => choose(dot.dataset.kernel));
    dot.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(dot.dataset.kernel);
      dot.focus();
    });
  }
  for (const row of all("tr[data-kernel]")) row.addEventListener("click", () => choose(row.dataset.kernel));

  // Tables: a click on a heading sorts by it, the largest first; another one turns the order around.
  for (const button of all(".sort")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const body = head.closest("table").tBodies[0];
      const at = head.cellIndex;
      const number = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const rising = before ? before === "descending" : !number;
      const value = (row) => row.cells[at].dataset.value;
      const order = (one, other) => (number ? value(one) - value(other) : value(one).localeCompare(value(other)));
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      body.append(...[...body.rows].sort((one, other) => (rising ? 1 : -1) * order(one, other)));
    });
  }
})();
