// Pages for perception: a few elements in the style of MiniWoB++ at random places, equal for equal seeds.
// `dartrlSyntheticPage(seed)` rebuilds the task area of the page it runs in; there is no task and no instruction.
window.dartrlSyntheticPage = (seed) => {
  Math.seedrandom(String(seed));
  const pick = (list) => list[Math.floor(Math.random() * list.length)];
  const between = (low, high) => low + Math.floor(Math.random() * (high - low));
  const CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  const BUTTONS = ["ok", "Ok", "Okay", "cancel", "Cancel", "submit", "Submit", "yes", "Yes", "no", "No", "next", "Next", "previous", "Previous",
    "ONE", "TWO", "OK", "Login", "Click Me!", "Rectangle", "Circle", "Triangle", "Letter", "Number", "Tab #1", "Tab #2", "Tab #3"];
  const WORDS = ["lorem", "ipsum", "dolor", "sit", "amet", "elit", "ut", "purus", "lectus", "magna", "urna", "vitae", "nunc", "sed", "velit", "eu",
    "sem", "justo", "eget", "non", "diam", "id", "risus", "at", "tempor", "morbi", "et", "netus", "ac", "turpis", "enim", "tellus", "cras", "massa"];
  const COLORS = ["red", "green", "blue", "aqua", "black", "magenta", "yellow", "orange", "white", "purple", "cyan", "brown", "olive", "lime", "grey", "pink"];
  const string = () => Array.from({ length: between(2, 8) }, () => pick(CHARACTERS)).join("");

  const button = () => `<button${Math.random() < 0.2 ? ' class="secondary-action"' : ""}>${Math.random() < 0.85 ? pick(BUTTONS) : string()}</button>`;
  const link = () => `<span class="alink" style="text-decoration:underline;color:blue">${pick(WORDS)}</span>`;
  const option = (type) => `<label><input type="${type}" style="width:20px">${string()}</label>`;
  const field = () => `<input type="text" style="width:${between(60, 130)}px">`;
  const swatch = () => {
    const color = pick(COLORS), side = between(20, 44);
    return `<div class="color" data-color="${color}" style="background-color:${color};width:${side}px;height:${side}px"></div>`;
  };
  const shape = () => {
    const side = between(8, 44), color = pick(COLORS);
    const inner = pick([
      `<circle cx="${side / 2}" cy="${side / 2}" r="${side / 2 - 1}" fill="${color}" stroke="black"/>`,
      `<rect x="1" y="1" width="${side - 2}" height="${side - 2}" fill="${color}" stroke="black"/>`,
      `<polygon points="1,${side - 1} ${side / 2},1 ${side - 1},${side - 1}" fill="${color}" stroke="black"/>`,
    ]);
    return `<svg width="${side}" height="${side}" style="display:block">${inner}</svg>`;
  };
  const box = () => {
    const isLarge = Math.random() < 0.5, side = isLarge ? 48 : 18, id = isLarge ? "draggableLarge" : "draggableSmall";
    return document.getElementById(id) ? null
      : `<div id="${id}" style="width:${side}px;height:${side}px;border:1px solid black;background:${isLarge ? "blue" : "red"}">${isLarge ? "L" : "s"}</div>`;
  };
  const kinds = [button, button, button, link, () => option("checkbox"), () => option("radio"), field, field, swatch, shape, shape, box,
    () => `<b>${pick(WORDS)}</b>`];

  const area = document.querySelector("#area"), taken = [], labels = new Set(), favourite = pick(kinds), isUniform = Math.random() < 0.4;
  area.innerHTML = "";
  document.querySelector("#query").innerHTML = "";
  for (let count = between(1, 7); count > 0; count--) {
    const html = (isUniform && Math.random() < 0.85 ? favourite : pick(kinds))();
    if (html === null || labels.has(html)) continue;
    labels.add(html);
    const holder = document.createElement("div");
    holder.style = "position:absolute;left:0;top:0;white-space:nowrap";
    holder.innerHTML = html;
    area.appendChild(holder);
    const { width, height } = holder.getBoundingClientRect();
    let isPlaced = false;
    for (let attempt = 0; attempt < 60 && !isPlaced && width <= 150; attempt++) {
      const x = between(1, Math.max(2, 159 - width)), y = between(51, Math.max(52, 208 - height));
      isPlaced = taken.every(([left, top, right, bottom]) => x + width < left || right < x || y + height < top || bottom < y);
      if (isPlaced) {
        Object.assign(holder.style, { left: `${x}px`, top: `${y}px` });
        taken.push([x, y, x + width, y + height]);
      }
    }
    if (!isPlaced) holder.remove();
  }
};
