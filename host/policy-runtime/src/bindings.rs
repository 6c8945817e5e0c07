//! Host bindings of each world, in two forms: called synchronously (guests without WASI), and by `call_async` (guests that
//! import it; the sync WASI linker would block inside tokio).

macro_rules! bindings {
    ($module:ident, $world:literal $(, $async:ident)?) => {
        #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
        pub(crate) mod $module {
            wasmtime::component::bindgen!({
                path: "../../wit",
                world: $world,
                $(exports: { default: $async },)?
            });
        }
    };
}

bindings!(filter, "filter");
bindings!(scorer, "scorer");
bindings!(selector, "selector");
bindings!(decode_override, "decode-override");
bindings!(filter_async, "filter", async);
bindings!(scorer_async, "scorer", async);
bindings!(selector_async, "selector", async);
bindings!(decode_override_async, "decode-override", async);

/// The interface `state`, which worlds may import.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub(crate) mod memory {
    wasmtime::component::bindgen!({
        path: "../../wit",
        inline: "package pointsman:host; world memory { import pointsman:policy/state@0.1.0; }",
        world: "pointsman:host/memory",
    });
}
