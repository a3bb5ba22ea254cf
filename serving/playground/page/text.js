// Offsets of answers count Unicode code points; a JavaScript string counts UTF-16 units.

/** Where each character that takes two units stands, in code points, ascending. */
function wide(text) {
  const places = [];
  for (let i = 0, point = 0; i < text.length; i++, point++) {
    if (text.codePointAt(i) > 0xffff) {
      places.push(point);
      i++;
    }
  }
  return places;
}

/** How many of the ascending `places` are below `point`. */
function below(places, point) {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < point) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A text that is cut by code points: `length`, and `slice(start, end)` as Python's text[start:end]. */
export class Points {
  constructor(text) {
    this.text = text;
    this.wide = wide(text);
    this.length = text.length - this.wide.length;
  }

  slice(start, end = this.length) {
    return this.text.slice(start + below(this.wide, start), end + below(this.wide, end));
  }
}

const NUMBER = new Intl.NumberFormat("en");

export const count = (n, one, many = `${one}s`) => `${NUMBER.format(n)} ${n === 1 ? one : many}`;

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.001 ? 2 : 1)}%`;

export const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(1) : NUMBER.format(Math.round(ms))} ms`;

/** An element with properties and children; a text stays text, whatever is in it. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
