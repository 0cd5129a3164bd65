"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const place = "async-rlhf " + document.title;
  const kept = (storage, key) => { try { return storage.getItem(key); } catch { return null; } };
  const keep = (storage, key, value) => { try { storage.setItem(key, value); } catch { /* not allowed here */ } };
  const before = JSON.parse(kept(sessionStorage, place) || "null");

  // Light or dark: as the system says, until the button is pressed.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme === "dark";
  function paint() {
    const chosen = kept(localStorage, "async-rlhf theme");
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    button.textContent = dark() ? "Light" : "Dark";
    return draw();
  }
  button.addEventListener("click", () => {
    keep(localStorage, "async-rlhf theme", dark() ? "light" : "dark");
    root.dataset.theme = dark() ? "light" : "dark";
    button.textContent = dark() ? "Light" : "Dark";
    draw();
  });
  system.addEventListener("change", paint);

  // Sections can be folded. On a phone most are, until the reader opens them; charts in them are drawn all the same.
  function fold(section, folded) {
    section.classList.toggle("folded", folded);
    section.querySelector(".fold").setAttribute("aria-expanded", String(!folded));
  }
  [...document.querySelectorAll("section")].forEach((section, number) => {
    const small = number > 2 && innerWidth <= 640 && location.hash !== "#" + section.id;
    fold(section, before && data.refresh ? before.folded?.includes(section.id) : small);
    section.querySelector(".fold").addEventListener("click", () => fold(section, !section.classList.contains("folded")));
  });
  for (const link of document.querySelectorAll("nav a"))
    link.addEventListener("click", () => fold(document.querySelector(link.hash), false));

  // Runs that the reader has hidden.
  const hidden = new Set(data.refresh && before?.hidden || []);
  function chosen(spec) {
    return { ...spec, data: { values: spec.data.values.filter((row) => !hidden.has(row.series)) } };
  }
  function press() {
    for (const one of document.querySelectorAll("[data-series]"))
      one.setAttribute("aria-pressed", String(!hidden.has(one.dataset.series)));
  }
  for (const one of document.querySelectorAll("[data-series]"))
    one.addEventListener("click", () => {
      if (!hidden.delete(one.dataset.series)) hidden.add(one.dataset.series);
      press();
      draw();
    });
  press();

  // Charts, one after another. ast: expressions are interpreted, so that the page needs no eval.
  const views = window.charts = {};
  let round = 0;
  async function draw() {
    const mine = ++round;
    for (const [name, spec] of Object.entries(data.specs)) {
      const signals = views[name] ? { from: views[name].signal && has(views[name], "from") } : {};
      const options = { config: dark() ? data.dark : data.light, renderer: "canvas", ast: true,
        actions: { export: true, source: false, compiled: false, editor: false }, downloadFileName: name };
      const element = document.getElementById(name);
      try {
        const { view } = await vegaEmbed(element, { ...chosen(spec), width: "container" }, options);
        if (mine !== round) { view.finalize(); return; }
        if (views[name]) views[name].finalize();
        views[name] = view;
        const from = signals.from ?? before?.from?.[name];
        if (from !== undefined && from !== null && has(view, "from") !== undefined) view.signal("from", from).run();
        element.dataset.drawn = "yes";
      } catch (error) {
        element.textContent = "This chart cannot be drawn: " + error.message;
        console.error(name, error);
      }
    }
    root.dataset.drawn = "yes";
  }
  function has(view, name) { try { return view.signal(name); } catch { return undefined; } }

  // Samples. Texts of models become text nodes, never HTML.
  const search = document.getElementById("search");
  const kind = document.getElementById("kind"), run = document.getElementById("run");
  const order = document.getElementById("order");
  const groups = document.getElementById("groups"), more = document.getElementById("more");
  const STEP = 20;
  let shown = STEP;
  function element(tag, name, ...children) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  }
  function marked(text, word) {
    const pre = element("pre");
    let at = 0;
    const low = text.toLowerCase();
    // Where lower case has another length, places would not agree.
    while (word && low.length === text.length) {
      const next = low.indexOf(word, at);
      if (next < 0) break;
      pre.append(text.slice(at, next), element("mark", "", text.slice(next, next + word.length)));
      at = next + word.length;
    }
    pre.append(text.slice(at));
    return pre;
  }
  function answer(one, word) {
    const facts = [one.run];
    if (one.batch !== null) facts.push("batch " + one.batch);
    if (one.score !== null && one.score !== undefined) facts.push("score " + Number(one.score).toFixed(3));
    if (one.finish === "length") facts.push("cut off");
    for (const [name, value] of Object.entries(one.metrics || {}))
      if (value !== null) facts.push(name.replaceAll("_", " ") + " " + Number(Number(value).toPrecision(4)));
    const life = one.life ? [element("details", "small", element("summary", "", "its life"), element("pre", "life", one.life))] : [];
    return element("div", "answer", element("div", "small", facts.join(", ")), marked(one.text, word), ...life);
  }
  // How far the scores of one prompt lie apart: means of runs, or of one run its answers.
  function apart(answers) {
    const runs = Object.groupBy(answers.filter((one) => typeof one.score === "number"), (one) => one.run);
    const scores = Object.values(runs).map((own) => own.map((one) => one.score));
    const told = scores.length > 1 ? scores.map((own) => own.reduce((a, b) => a + b) / own.length) : scores.flat();
    return told.length ? Math.max(...told) - Math.min(...told) : -1;
  }
  function list() {
    if (!search) return;
    const word = search.value.trim().toLowerCase();
    const found = [];
    for (const group of data.samples) {
      if (kind.value && group.kind !== kind.value) continue;
      let answers = group.answers.filter((one) => !run.value || one.run === run.value);
      if (word && !group.prompt.toLowerCase().includes(word))
        answers = answers.filter((one) => one.text.toLowerCase().includes(word));
      if (answers.length) found.push([group, answers]);
    }
    if (order.value) found.sort((one, other) => apart(other[1]) - apart(one[1]));
    groups.replaceChildren(...found.slice(0, shown).map(([group, answers]) =>
      element("article", "group", element("div", "small", group.kind), marked(group.prompt, word),
        element("div", "answers", ...answers.map((one) => answer(one, word))))));
    const total = found.reduce((sum, [, answers]) => sum + answers.length, 0);
    document.getElementById("found").textContent = `${total} completions of ${found.length} prompts`;
    more.hidden = found.length <= shown;
  }
  function choices(select, names) {
    select.append(new Option("all", ""), ...names.map((name) => new Option(name, name)));
  }
  if (search) {
    choices(kind, [...new Set(data.samples.map((group) => group.kind))]);
    choices(run, [...new Set(data.samples.flatMap((group) => group.answers.map((one) => one.run)))]);
    search.form.addEventListener("submit", (event) => event.preventDefault());
    for (const input of [search, kind, run, order]) input.addEventListener("input", () => { shown = STEP; list(); });
    more.addEventListener("click", () => { shown += STEP; list(); });
    const asked = new URLSearchParams(location.search).get("search");
    if (asked) { search.value = asked; fold(search.closest("section"), false); }
  }

  // A page that follows a run loads itself again, and puts the reader back where they were.
  function remember() {
    const from = Object.fromEntries(Object.entries(views).map(([name, view]) => [name, has(view, "from")]));
    const heights = Object.fromEntries(Object.keys(data.specs).map((name) => [name, document.getElementById(name).offsetHeight]));
    const open = [...document.querySelectorAll("details[id][open]")].map((one) => one.id);
    keep(sessionStorage, place, JSON.stringify({ y: scrollY, open, from, heights, shown,
      folded: [...document.querySelectorAll("section.folded")].map((one) => one.id), hidden: [...hidden], order: order?.value,
      search: search?.value, kind: kind?.value, run: run?.value, focus: document.activeElement?.id }));
  }
  if (before && data.refresh) {
    // As high as they will be, so that the place is there before they are drawn.
    for (const [name, height] of Object.entries(before.heights)) {
      const chart = document.getElementById(name);
      if (chart) chart.style.minHeight = height + "px";
    }
    for (const id of before.open) document.getElementById(id)?.setAttribute("open", "");
    if (search) { search.value = before.search; kind.value = before.kind; run.value = before.run; order.value = before.order; shown = before.shown; }
  }
  if ("scrollRestoration" in history) history.scrollRestoration = data.refresh ? "manual" : "auto";
  function back() {
    if (!before || !data.refresh) return;
    scrollTo(0, before.y);
    document.getElementById(before.focus)?.focus({ preventScroll: true });
  }
  list();
  back();
  paint().then(() => {
    if (!data.refresh) return;
    if (before && Math.abs(scrollY - before.y) > 1) back();
    // Not earlier: what is not drawn yet has no place to remember.
    setInterval(() => {
      if (document.hidden || document.activeElement === search) return;  // nobody looks, or somebody types
      remember();
      location.reload();
    }, 1000 * data.refresh);
  });
})();
