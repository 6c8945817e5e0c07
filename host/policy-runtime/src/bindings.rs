//! Host bindings of each world, in two forms: called synchronously (guests without WASI), and by `call_async`
//! (guests that import it; the sync WASI linker would block inside tokio).

macro_rules! bindings {
    ($module:ident, $world:literal $(, $async:ident)?) => {
        #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
        pub(crate) mod $module {
            wasmtime::component::bindgen!({
                path: "../../wit",
                world: $world,
                // A call that takes too long is ended by a trap.
                imports: { default: trappable },
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

/// The interface `learning`, which a guest of any world may export.
macro_rules! learner {
    ($module:ident, $package:literal, $world:literal $(, $async:ident)?) => {
        #[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
        pub(crate) mod $module {
            wasmtime::component::bindgen!({
                path: "../../wit",
                inline: $package,
                world: $world,
                $(exports: { default: $async },)?
            });
        }
    };
}

learner!(
    learner,
    "package pointsman:host; world learner { export pointsman:policy/learning@0.1.1; }",
    "pointsman:host/learner"
);
learner!(
    learner_async,
    "package pointsman:host; world learner { export pointsman:policy/learning@0.1.1; }",
    "pointsman:host/learner",
    async
);

/// The interface `state`, which worlds may import.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub(crate) mod memory {
    wasmtime::component::bindgen!({
        path: "../../wit",
        inline: "package pointsman:host; world memory { import pointsman:policy/state@0.1.1; }",
        world: "pointsman:host/memory",
        imports: { default: trappable },
    });
}
