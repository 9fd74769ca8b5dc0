// Runs tests on a Python that was built for WebAssembly: `node tests/support/wasm.mjs PYODIDE PACKAGES FILE...`, from the root.
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const [pyodide, packages, ...files] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(resolve(pyodide, "pyodide.mjs")));
const python = await loadPyodide({ env: { HOME: "/tmp", PYTHONDONTWRITEBYTECODE: "1" } });
for (const [name, root] of [["/project", "."], ["/packages", packages]]) {
  python.FS.mkdirTree(name);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: resolve(root) }, name);
}
python.globals.set("files", python.toPy(files));
process.exit(python.runPython(`
import os, sys
sys.path[:0] = ["/project", "/project/tests/support", "/packages"]
os.chdir("/project")
import wasm
wasm.main(list(files))
`));
