
// ---- runs beside one another: who points at the name of one sees its curves alone ------------------------------------------------
function point(run) {
  for (const curve of document.querySelectorAll("svg [data-of]")) curve.classList.toggle("aside", run !== undefined && curve.dataset.of !== run);
}
for (const name of document.querySelectorAll("[data-run]")) {
  name.onpointerenter = () => point(name.dataset.run);
  name.onpointerleave = () => point();
}
