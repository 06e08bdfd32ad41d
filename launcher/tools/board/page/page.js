// Lists the runs, draws their curves, and asks the server it came from, if any, for what is new.
// Names, reasons and paths are foreign: they become text and never markup.
"use strict";
(() => {
  const STATES = {
    running: ["part", "▶"], paused: ["skipped", "‖"], finished: ["runs", "✓"],
    stopped: ["warns", "■"], failed: ["fails", "✕"], unknown: ["skipped", "?"],
  };
  const YS = {
    loss: "loss", rate: "tokens/s", norm: "gradient norm", lr: "learning rate",
  };
  const XS = { iteration: "iteration", tokens: "tokens", hours: "hours of training" };
  const SORTS = {
    name: ["name", (run) => run.name.toLowerCase()],
    state: ["state", (run) => Object.keys(STATES).indexOf(run.state)],
    loss: ["loss", (run) => run.loss, "number loss"],
    rate: ["tokens/s", (run) => run.rate, "number rate"],
    iteration: ["iteration", (run) => run.iteration, "number at"],
    created: ["started", (run) => run.created, "number when"],
  };
  const PART = 100; // rows that are added at a time
  const COLOURS = 8;
  const SVG = "http://www.w3.org/2000/svg";

  const $ = (id) => document.getElementById(id);
  const view = {
    query: "", states: new Set(), sort: "created", down: true, chosen: new Set(), open: new Set(),
    y: "loss", x: "iteration", log: false, smooth: 0, limit: PART,
  };
  let data = { runs: [] }, byId = new Map(), lines = new Map(), shown = [], drawn = null;

  function make(tag, given = {}, ...inner) {
    const part = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name in part && name !== "list") part[name] = value;
      else part.setAttribute(name, value);
    }
    part.append(...inner.filter((each) => each !== null && each !== undefined));
    return part;
  }

  function svg(tag, given, text) {
    const part = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(given)) part.setAttribute(name, value);
    if (text !== undefined) part.textContent = text;
    return part;
  }

  // Numbers and times, as people read them.

  function short(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))} ${letter}`;
    }
    if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0*e/, "e");
    return String(Number(value.toPrecision(4)));
  }

  function time(text) {
    const found = new Date(text), now = new Date();
    if (Number.isNaN(found.getTime())) return text;
    const year = found.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
    return found.toLocaleString(undefined, {
      ...year, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
    });
  }

  function took(seconds) {
    if (!(seconds >= 0)) return "";
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
    if (days) return `${days} d ${hours % 24} h`;
    return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
  }

  // The runs, and the curves of each with those it goes on from.

  function take(found) {
    data = found;
    byId = new Map(data.runs.map((run) => [run.run, run]));
    lines = new Map();
    const ordered = [...data.runs].sort((a, b) => (a.created < b.created ? -1 : 1));
    for (const run of ordered) {
      const name = run.line || run.run;
      if (!lines.has(name)) lines.set(name, []);
      lines.get(name).push(run);
    }
    for (const run of data.runs) {
      const rates = run.curves?.rate;
      run.rate = rates ? rates[rates.length - 1] : null;
      run.text = [
        run.name, run.run, run.state, run.model, run.layout, run.image, run.backend, run.saved,
        ...(run.why || []),
      ].join(" ").toLowerCase();
    }
  }

  const lineOf = (run) => lines.get(run.line || run.run);

  function below(values, limit) { // how many of rising values are smaller
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < limit) low = middle + 1; else high = middle;
    }
    return low;
  }

  // One curve of a run and of those before it in its line: what was trained again counts once.
  function joined(run) {
    const names = ["iteration", "ms", "samples", ...Object.keys(YS)];
    const whole = Object.fromEntries(names.map((name) => [name, []]));
    const found = { whole, resumed: [], validation: [], alarms: [], sequence: run.sequence };
    for (const part of lineOf(run)) {
      const curves = part.curves || {}, iterations = curves.iteration || [];
      if (iterations.length) {
        const kept = below(whole.iteration, iterations[0]);
        const offset = kept ? whole.ms[kept - 1] : 0;
        if (kept) found.resumed.push(iterations[0]);
        for (const name of names) {
          const more = curves[name] || iterations.map(() => null);
          whole[name].length = kept;
          for (const value of more) whole[name].push(name === "ms" ? value + offset : value);
        }
        found.validation = found.validation.filter(([at]) => at < iterations[0]);
      }
      found.validation.push(...(part.validation || []));
      found.alarms.push(...(part.alarms || []));
      if (part === run) break;
    }
    return found;
  }

  function along(found) { // what each point's place is measured by
    const { whole, sequence } = found;
    if (view.x === "iteration") return whole.iteration;
    if (view.x === "hours") return whole.ms.map((ms) => ms / 3.6e6);
    return whole.samples.map((samples) => (samples && sequence ? samples * sequence : null));
  }

  function smoothed(values, weight) {
    let mean = 0, share = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return null;
      mean = mean * weight + value * (1 - weight);
      share = share * weight + 1 - weight;
      return mean / share;
    });
  }

  // The chart.

  const places = new Map(); // the number of each chosen run's colour, which it keeps

  function colour(id) {
    for (const other of places.keys()) if (!view.chosen.has(other)) places.delete(other);
    let free = 0;
    while ([...places.values()].includes(free)) free += 1;
    if (!places.has(id)) places.set(id, free);
    return places.get(id);
  }

  function tint() { // the boxes of the list have their curves' colours
    for (const pick of document.querySelectorAll(".pick")) {
      pick.style.accentColor = pick.checked ? `var(--c${colour(pick.closest(".cell").id.slice(4)) % COLOURS})` : "";
    }
  }

  function series() {
    return [...view.chosen].map((id) => byId.get(id)).filter((run) => run).map((run) => {
      const index = colour(run.run);
      const found = joined(run), xs = along(found), raw = found.whole[view.y];
      const place = (iteration) => xs[Math.min(xs.length - 1, below(found.whole.iteration, iteration))];
      return {
        run, xs, raw, ys: view.smooth ? smoothed(raw, view.smooth) : raw,
        colour: `var(--c${index % COLOURS})`, dash: index >= COLOURS ? "6 3" : "",
        points: view.y === "loss" ? found.validation.map(([at, loss]) => [place(at), loss]) : [],
        resumed: found.resumed.map(place),
        alarms: found.alarms.map(([at, text]) => [place(at), text]),
        iterations: found.whole.iteration,
      };
    });
  }

  function range(all, log) {
    let low = Infinity, high = -Infinity;
    for (const value of all) {
      if (value === null || value === undefined || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return null;
    if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
    return [low, high];
  }

  function ticks(low, high, most) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(at * step);
    return found;
  }

  function logTicks(low, high) {
    for (const parts of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 5, 7]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        found.push(...parts.map((each) => each * 10 ** power).filter((each) => each >= low && each <= high));
      }
      if (found.length >= 3) return found.filter((_, at) => at % Math.ceil(found.length / 8) === 0);
    }
    return ticks(low, high, 4).filter((each) => each > 0);
  }

  function path(one, values, x, y) {
    let text = "", pen = "M";
    values.forEach((value, at) => {
      if (value === null || value === undefined || one.xs[at] === null || (view.log && value <= 0)) {
        pen = "M";
        return;
      }
      text += `${pen}${x(one.xs[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }

  function draw() {
    const all = series(), plot = $("plot");
    const flat = (key) => all.flatMap((one) => one[key]);
    const xr = range(flat("xs"), false);
    const yr = range([...flat("ys"), ...all.flatMap((one) => one.points.map((point) => point[1]))], view.log);
    drawn = null;
    plot.replaceChildren();
    legend(all);
    tint();
    $("empty").hidden = Boolean(xr && yr);
    plot.style.display = xr && yr ? "" : "none";
    $("tip").hidden = true;
    const width = plot.clientWidth, height = plot.clientHeight;
    if (!(xr && yr) || width < 50) return;
    const left = 58, right = width - 24, top = 14, bottom = height - 38;
    const scale = view.log ? Math.log10 : (value) => value;
    const [low, high] = yr.map(scale), pad = (high - low) * 0.04;
    const x = (value) => left + ((value - xr[0]) / (xr[1] - xr[0])) * (right - left);
    const y = (value) => bottom - ((scale(value) - low + pad) / (high - low + 2 * pad)) * (bottom - top);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const each of view.log ? logTicks(...yr) : ticks(...yr, 5)) {
      plot.append(svg("line", { x1: left, x2: right, y1: y(each), y2: y(each), class: "rule" }));
      plot.append(svg("text", { x: left - 8, y: y(each) + 4, "text-anchor": "end" }, short(each)));
    }
    for (const each of ticks(...xr, Math.max(2, Math.min(8, width / 110)))) {
      plot.append(svg("line", { x1: x(each), x2: x(each), y1: bottom, y2: bottom + 4, class: "rule" }));
      plot.append(svg("text", { x: x(each), y: bottom + 17, "text-anchor": "middle" }, short(each)));
    }
    plot.append(svg("text", { x: right, y: height - 4, "text-anchor": "end" }, XS[view.x]));
    plot.append(svg("text", { x: 4, y: 11 }, YS[view.y]));
    for (const one of all) {
      const given = { stroke: one.colour, class: "curve", "stroke-dasharray": one.dash };
      if (view.smooth) plot.append(svg("path", { ...given, class: "curve faint", d: path(one, one.raw, x, y) }));
      plot.append(svg("path", { ...given, d: path(one, one.ys, x, y) }));
      for (const at of one.resumed) {
        const mark = svg("path", { d: `M${x(at)} ${bottom}l-4 7h8z`, fill: one.colour });
        mark.append(svg("title", {}, "resumed"));
        plot.append(mark);
      }
      for (const [at, text] of one.alarms) {
        const line = svg("line", { x1: x(at), x2: x(at), y1: top, y2: bottom, stroke: one.colour, class: "alarm" });
        line.append(svg("title", {}, text));
        plot.append(line);
      }
      for (const [at, value] of one.points) {
        if (value === null || at === null || at === undefined || (view.log && value <= 0)) continue;
        plot.append(svg("circle", { cx: x(at), cy: y(value), r: 3, stroke: one.colour, class: "point" }));
      }
    }
    const cross = svg("line", { y1: top, y2: bottom, class: "cross", visibility: "hidden" });
    plot.append(cross);
    drawn = { all, x, y, left, right, cross, xr, at: null };
  }

  function legend(all) {
    $("legend").replaceChildren(...all.map((one) => {
      const swatch = make("span", { className: one.dash ? "swatch dashed" : "swatch" });
      swatch.style.color = one.colour;
      const button = make("button", { type: "button", title: "take it out of the chart" },
        swatch, `${one.run.name} `, make("code", {}, one.run.run), " ×");
      button.addEventListener("click", () => choose(one.run.run));
      return make("li", {}, button);
    }));
  }

  // The values nearest to a place in the chart.
  function read(place) {
    if (!drawn) return;
    const { all, x, left, right, cross, xr } = drawn;
    const at = xr[0] + ((Math.min(right, Math.max(left, place)) - left) / (right - left)) * (xr[1] - xr[0]);
    const lines = [`${XS[view.x]} ${view.x === "iteration" ? Math.round(at) : short(at)}`];
    for (const one of all) {
      const known = one.xs;
      if (!known.length || at > known[known.length - 1] * 1.001 || at < known[0] * 0.999) continue;
      let near = Math.min(known.length - 1, below(known, at));
      if (near && at - known[near - 1] < known[near] - at) near -= 1;
      const value = one.ys[near];
      const step = view.x === "iteration" ? "" : `, iteration ${one.iterations[near]}`;
      lines.push(`${one.run.name} ${one.run.run}: ${value === null || value === undefined ? "–" : short(value)}${step}`);
    }
    drawn.at = Math.min(right, Math.max(left, place));
    cross.setAttribute("x1", drawn.at);
    cross.setAttribute("x2", drawn.at);
    cross.setAttribute("visibility", "visible");
    const tip = $("tip");
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    const room = $("chart").clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(room, x(at) + 22))}px`;
    tip.style.top = "1.6rem";
  }

  function unread() {
    if (drawn) drawn.cross.setAttribute("visibility", "hidden");
    $("tip").hidden = true;
  }

  function save() {
    const copy = $("plot").cloneNode(true), seen = [...$("plot").querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((part, at) => {
      const style = getComputedStyle(seen[at]);
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font"]) {
        part.style.setProperty(name, style.getPropertyValue(name));
      }
    });
    copy.setAttribute("xmlns", SVG);
    copy.style.background = getComputedStyle($("chart")).backgroundColor;
    const address = URL.createObjectURL(new Blob([copy.outerHTML], { type: "image/svg+xml" }));
    make("a", { href: address, download: `${view.y}.svg` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  // The list.

  function arrange() {
    const words = view.query.toLowerCase().split(/\s+/).filter(Boolean);
    const key = SORTS[view.sort][1], sign = view.down ? -1 : 1;
    shown = data.runs.filter((run) => (!view.states.size || view.states.has(run.state))
      && words.every((word) => run.text.includes(word)));
    shown.sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      if (one === other) return a.run < b.run ? -1 : 1;
      if (one === null || one === undefined) return 1;
      if (other === null || other === undefined) return -1;
      return one < other ? -sign : sign;
    });
    list();
  }

  function list() {
    const focused = document.activeElement?.closest?.(".cell")?.id;
    const inner = document.activeElement?.className;
    const rows = shown.slice(0, view.limit).map(row);
    $("rows").replaceChildren(...rows);
    tint();
    if (focused) {
      const again = document.getElementById(focused);
      (inner === "pick" ? again?.querySelector(".pick") : again?.firstChild)?.focus({ preventScroll: true });
    }
    $("more").hidden = shown.length <= view.limit;
    $("nothing").hidden = shown.length > 0;
    $("nothing").textContent = data.runs.length ? "No run fits." : "No run has a record yet: launcher run CONFIG starts one.";
    $("shown").textContent = `${shown.length} of ${data.runs.length}`;
    for (const button of $("sorts").querySelectorAll("button")) {
      const mine = button.dataset.sort === view.sort;
      button.setAttribute("aria-pressed", String(mine));
      button.textContent = SORTS[button.dataset.sort][0] + (mine ? (view.down ? " ↓" : " ↑") : "");
    }
    remember();
  }

  function states() {
    const buttons = Object.entries(STATES).map(([state, [kind, sign]]) => {
      const count = data.runs.filter((run) => run.state === state).length;
      if (!count) return null;
      const button = make("button", { type: "button", className: `chip ${kind}` },
        make("span", { ariaHidden: "true" }, `${sign} `), `${state} `, make("b", {}, String(count)));
      button.dataset.state = state;
      button.setAttribute("aria-pressed", String(view.states.has(state)));
      button.addEventListener("click", () => {
        if (!view.states.delete(state)) view.states.add(state);
        button.setAttribute("aria-pressed", String(view.states.has(state)));
        view.limit = PART;
        arrange();
      });
      return button;
    });
    $("states").replaceChildren(...buttons.filter((each) => each));
  }

  function row(run) {
    const [kind, sign] = STATES[run.state] || STATES.unknown;
    const line = lineOf(run), at = line.indexOf(run);
    const gpus = run.world ? (run.cpu ? `CPU × ${run.world}` : `${run.world} GPU${run.world > 1 ? "s" : ""}`) : "";
    const sizes = [run.model, gpus, run.layout].filter(Boolean).join(" · ");
    const pick = make("input", {
      type: "checkbox", className: "pick", checked: view.chosen.has(run.run),
      ariaLabel: `compare ${run.name} ${run.run}`, disabled: !isDrawn(run),
    });
    pick.addEventListener("change", () => choose(run.run));
    const cell = make("details", { className: `cell ${kind}`, id: `run-${run.run}` },
      make("summary", {},
        pick,
        make("span", { className: "name" }, make("b", { title: run.name }, run.name),
          make("code", {}, run.run + (at > 0 ? ` ↳ ${line[at - 1].run}` : ""))),
        make("span", { className: "badge" }, make("span", { ariaHidden: "true" }, `${sign} `), run.state),
        make("span", { className: "about" },
          make("span", { className: "what", title: sizes }, sizes),
          run.why ? make("span", { className: "why", title: run.why.join("\n") }, run.why[0]) : null),
        make("span", { className: "number loss" }, run.loss === undefined ? "" : short(run.loss)),
        make("span", { className: "number rate" }, short(run.rate)),
        make("span", { className: "number at" }, progress(run, " / ")),
        make("span", { className: "number when" }, time(run.created))));
    if (view.open.has(run.run)) open(cell, run);
    cell.addEventListener("toggle", () => {
      if (!cell.open) view.open.delete(run.run);
      else if (!view.open.has(run.run)) {
        view.open.add(run.run);
        open(cell, run);
      }
      remember();
    });
    return cell;
  }

  function progress(run, between) {
    const whole = (number) => (number < 1e6 ? String(number) : short(number));
    if (run.iteration === undefined) return "";
    return whole(run.iteration) + (run.of ? between + whole(run.of) : "");
  }

  const isDrawn = (run) => lineOf(run).some((part) => part.curves);

  function left(run) { // seconds to go, by the newest steps
    const { iteration, ms } = run.curves || {};
    if (!run.of || !iteration || iteration.length < 2) return NaN;
    const last = iteration.length - 1, from = Math.max(0, last - 10);
    return ((run.of - iteration[last]) * (ms[last] - ms[from])) / (iteration[last] - iteration[from]) / 1000;
  }

  function open(cell, run) {
    const going = run.state === "running" || run.state === "paused";
    const facts = {
      model: run.model, experts: run.experts, layout: run.layout,
      processes: run.world, "tokens a sequence": run.sequence,
      iteration: progress(run, " of "),
      "time left": run.state === "running" ? took(left(run)) : "",
      started: time(run.created), ended: run.ended ? time(run.ended) : "",
      took: run.ended ? took((new Date(run.ended) - new Date(run.created)) / 1000) : "",
      "exit code": run.code, backend: run.backend, image: run.image,
      "newest checkpoint": run.saved, record: `${data.folder}/${run.run}`,
    };
    const entries = Object.entries(facts).filter(([, value]) => value !== undefined && value !== "" && value !== null);
    const body = make("div", { className: "body" });
    const why = [...(run.why || []), ...(run.alarms || []).map(([at, text]) => `iteration ${at}: ${text}`)];
    if (why.length) body.append(make("div", { className: "because" }, ...why.map((text) => make("p", {}, text))));
    body.append(make("dl", {}, ...entries.map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
    const receipt = (data.receipts || {})[run.run];
    if (receipt) body.append(make("pre", { className: "receipt" }, receipt.join("\n")));
    const line = lineOf(run);
    if (line.length > 1) {
      body.append(make("p", { className: "links" }, "resumed: ", ...line.map((each) =>
        each === run ? make("b", {}, each.run) : make("a", { href: `#run=${each.run}` }, each.run))));
    }
    const alone = isDrawn(run) ? [make("a", { href: `#chosen=${run.run}` }, "its curve alone")] : [];
    body.append(make("p", { className: "links" }, ...alone, ...(run.files || []).map((name) =>
      make("a", { href: data.base + [run.run, ...name.split("/")].map(encodeURIComponent).join("/"), target: "_blank", rel: "noopener" }, name))));
    const commands = going
      ? [`launcher logs -f ${run.run}`, `launcher stop ${run.run}`]
      : [...(run.saved ? [`launcher resume ${run.run}`] : []), ...(run.state === "failed" ? [`launcher explain ${run.run}`] : [])];
    if (run.curves) commands.push(`launcher plot ${run.run}`);
    body.append(make("p", { className: "links" }, ...commands.map((text) => make("code", { className: "again" }, text))));
    if (cell.children.length > 1) cell.lastChild.remove();
    cell.append(body);
    cell.open = true;
  }

  function choose(id) {
    if (!view.chosen.delete(id)) view.chosen.add(id);
    const pick = document.getElementById(`run-${id}`)?.querySelector(".pick");
    if (pick) pick.checked = view.chosen.has(id);
    draw();
    remember();
  }

  // What is chosen stands in the address, so that it can be kept and sent.

  function remember() {
    const found = new URLSearchParams();
    if (view.chosen.size) found.set("chosen", [...view.chosen].join(","));
    if (view.states.size) found.set("state", [...view.states].join(","));
    for (const [name, usual] of Object.entries({ query: "", sort: "created", y: "loss", x: "iteration", smooth: 0 })) {
      if (view[name] !== usual) found.set(name, view[name]);
    }
    if (!view.down) found.set("down", "0");
    if (view.log) found.set("log", "1");
    history.replaceState(null, "", `#${found}`);
  }

  function recall() {
    const found = new URLSearchParams(location.hash.slice(1));
    const run = found.get("run");
    if (run !== null) { // a link to one run
      go(run);
      return;
    }
    const listed = (name) => (found.get(name) || "").split(",").filter(Boolean);
    view.chosen = new Set(listed("chosen").filter((id) => byId.has(id)));
    view.states = new Set(listed("state").filter((state) => STATES[state]));
    view.query = found.get("query") || "";
    view.sort = SORTS[found.get("sort")] ? found.get("sort") : "created";
    view.down = found.get("down") !== "0";
    view.y = YS[found.get("y")] ? found.get("y") : "loss";
    view.x = XS[found.get("x")] ? found.get("x") : "iteration";
    view.log = found.get("log") === "1";
    view.smooth = Math.min(0.99, Math.max(0, Number(found.get("smooth")) || 0));
    if (!view.chosen.size) {
      const known = [...data.runs].sort((a, b) => (a.created < b.created ? 1 : -1)).filter((each) => each.curves);
      const going = known.filter((each) => each.state === "running").slice(0, 4);
      view.chosen = new Set((going.length ? going : known.slice(0, 1)).map((each) => each.run));
    }
  }

  function go(id) {
    const run = byId.get(id);
    if (!run) return;
    view.query = "";
    view.states.clear();
    view.open.add(id);
    show();
    view.limit = Math.max(view.limit, shown.indexOf(run) + 1);
    list();
    const cell = document.getElementById(`run-${id}`);
    cell.scrollIntoView({ block: "center" });
    cell.firstChild.focus({ preventScroll: true });
  }

  function show() {
    $("query").value = view.query;
    $("y").value = view.y;
    $("x").value = view.x;
    $("log").checked = view.log;
    $("smooth").value = view.smooth;
    states();
    arrange();
    draw();
  }

  function about(note) {
    const silent = (data.notes || []).join("; ");
    $("about").textContent = [`${data.runs.length} run${data.runs.length === 1 ? "" : "s"} in ${data.folder}, as of ${time(data.written)}`, silent, note].filter(Boolean).join(" · ");
  }

  // The server that the page came from, if any, is asked for what is new while it is looked at.

  let mark = "", asking = false; // an engine may take its time to say what runs
  async function refresh() {
    if (document.hidden || asking) return;
    asking = true;
    try {
      const answer = await fetch("data", { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 200) {
        mark = answer.headers.get("ETag") || "";
        take(await answer.json());
        const at = scrollY;
        states();
        arrange();
        draw();
        scrollTo({ top: at, behavior: "instant" });
      } else if (answer.status !== 304) throw new Error(answer.statusText);
      about("");
    } catch {
      about("the launcher that serves this page doesn't answer");
    } finally {
      asking = false;
    }
  }

  function move(by) {
    const cells = [...$("rows").children];
    const at = cells.indexOf(document.activeElement.closest?.(".cell"));
    const next = at < 0 ? cells[by > 0 ? 0 : cells.length - 1] : cells[at + by];
    if (!next && by > 0 && !$("more").hidden) {
      more();
      $("rows").children[at + 1].firstChild.focus();
      return;
    }
    next?.firstChild.focus();
  }

  function more() {
    view.limit += PART;
    list();
  }

  function clear() {
    view.query = "";
    view.states.clear();
    view.limit = PART;
    $("query").value = "";
    states();
    arrange();
  }

  function connect() {
    const fill = (id, options) => {
      $(id).replaceChildren(...Object.entries(options).map(([value, text]) => make("option", { value }, text)));
      $(id).addEventListener("change", () => { view[id] = $(id).value; draw(); remember(); });
    };
    fill("y", YS);
    fill("x", XS);
    $("log").addEventListener("change", () => { view.log = $("log").checked; draw(); remember(); });
    $("smooth").addEventListener("input", () => { view.smooth = Number($("smooth").value); draw(); remember(); });
    $("none").addEventListener("click", () => { view.chosen.clear(); list(); draw(); });
    $("save").addEventListener("click", save);
    $("more").addEventListener("click", more);
    $("query").addEventListener("input", () => { view.query = $("query").value; view.limit = PART; arrange(); });
    $("sorts").replaceChildren(make("span"), ...Object.entries(SORTS).flatMap(([key, [name, , kind]]) => {
      const button = make("button", { type: "button", className: kind || "" }, name);
      button.dataset.sort = key;
      button.addEventListener("click", () => {
        view.down = view.sort === key ? !view.down : key !== "name";
        view.sort = key;
        arrange();
      });
      return key === "state" ? [button, make("span")] : [button];
    }));
    const plot = $("plot");
    plot.addEventListener("pointermove", (event) => read(event.clientX - plot.getBoundingClientRect().left));
    plot.addEventListener("pointerdown", (event) => read(event.clientX - plot.getBoundingClientRect().left));
    plot.addEventListener("pointerleave", unread);
    plot.addEventListener("blur", unread);
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !drawn) return;
      event.preventDefault();
      read((drawn.at ?? (by > 0 ? drawn.left : drawn.right)) + (by * (drawn.right - drawn.left)) / 100);
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target === $("query")) {
        if (event.key === "Escape") { clear(); $("query").blur(); }
        return;
      }
      if (event.target.tagName === "SELECT") return;
      const cell = event.target.closest?.(".cell");
      const keys = {
        "/": () => $("query").focus(),
        Escape: clear,
        j: () => move(1),
        k: () => move(-1),
        l: () => { view.log = !view.log; $("log").checked = view.log; draw(); remember(); },
        x: () => {
          const pick = cell?.querySelector(".pick");
          if (pick && !pick.disabled) choose(cell.id.slice(4));
        },
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    addEventListener("hashchange", () => { recall(); show(); });
    let width = 0;
    new ResizeObserver(() => {
      if ($("chart").clientWidth !== width) draw();
      width = $("chart").clientWidth;
    }).observe($("chart"));
    new IntersectionObserver((seen) => {
      if (seen.some((one) => one.isIntersecting) && !$("more").hidden) more();
    }, { rootMargin: "600px" }).observe($("more"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  take(JSON.parse($("data").textContent));
  $("data").remove();
  document.querySelector("main").hidden = false;
  connect();
  recall();
  show();
  about("");
  if (data.refresh) {
    setInterval(refresh, 1000 * data.refresh);
    document.addEventListener("visibilitychange", refresh);
  }
})();
