// A small chart of the last values of a series.
import {html, memo} from "./html.js";

const WIDTH = 300;
const HEIGHT = 80;
const ROOM = 1.12; // above the highest value

/** values: the youngest last. told: a value in words. */
export const Chart = memo(({values, label, told}) => {
  if (!values.length) return html`<p class="plot faint" role="img" aria-label=${`${label}: no values yet`}>No values yet</p>`;
  const high = Math.max(...values) * ROOM || 1;
  const x = (i) => (values.length > 1 ? (i / (values.length - 1)) * WIDTH : WIDTH);
  const y = (value) => HEIGHT - (value / high) * HEIGHT;
  const points = values.map((value, i) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`);
  const line = `M${values.length > 1 ? points.join("L") : `0 ${y(values[0]).toFixed(1)}H${WIDTH}`}`;
  const said = `${label}, the last ${values.length} values, from ${told(Math.min(...values))} to ${told(Math.max(...values))}`;
  return html`<div class="plot" role="img" aria-label=${said}>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path class="rule" d=${`M0 ${y(high / ROOM)}H${WIDTH}M0 ${y(high / ROOM / 2)}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`} />
      <path class="area" d=${`${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z`} /><path class="line" d=${line} />
    </svg>
    <span class="scale" aria-hidden="true"><span>${told(high / ROOM)}</span><span>${told(high / ROOM / 2)}</span><span>${told(0)}</span></span>
  </div>`;
});
