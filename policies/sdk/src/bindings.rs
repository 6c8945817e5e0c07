//! The generated bindings of each world, and the glue between them and the SDK's types. Only
//! [`crate::export!`] uses it.

#[doc(hidden)]
pub mod __glue {
    /// The interface `state`, which any world may import.
    #[cfg(all(feature = "state", target_family = "wasm"))]
    #[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
    pub mod memory {
        wit_bindgen::generate!({
            path: "../../wit",
            inline: "package pointsman:sdk; world memory { import pointsman:policy/state@0.1.1; }",
            world: "pointsman:sdk/memory",
            generate_all,
        });
    }

    /// The interface `log`, through which a panic tells its message and place.
    #[cfg(all(feature = "panic-message", target_family = "wasm"))]
    #[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
    mod panics {
        wit_bindgen::generate!({
            path: "../../wit",
            inline: "package pointsman:panics; world panics { import pointsman:policy/log@0.1.1; }",
            world: "pointsman:panics/panics",
            generate_all,
        });
    }

    /// Makes a panic log its message and place before the instance traps.
    pub fn report_panics() {
        #[cfg(feature = "panic-message")]
        std::panic::set_hook(Box::new(|panic| {
            use panics::pointsman::policy::log::{Level, log};

            let message = panic.payload_as_str().unwrap_or("no message");
            match panic.location() {
                Some(place) => log(Level::Error, &format!("panicked at {place}: {message}")),
                None => log(Level::Error, &format!("panicked: {message}")),
            }
        }));
    }

    /// The interface `learning`, which any world may export.
    #[cfg(all(feature = "learning", target_family = "wasm"))]
    #[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
    pub mod learning {
        pub mod bindings {
            wit_bindgen::generate!({
                path: "../../wit",
                inline: "package pointsman:learns; world learner { export pointsman:policy/learning@0.1.1; }",
                world: "pointsman:learns/learner",
                generate_all,
                pub_export_macro: true,
                default_bindings_module: "pointsman_policy_sdk::__glue::learning::bindings",
            });
        }
        pub use crate::__bind_learning as bind;
        pub use bindings::exports::pointsman::policy::learning as interface;

        #[must_use]
        pub fn outcome(seen: &interface::Outcome) -> crate::Outcome {
            crate::Outcome {
                decision: seen.decision,
                seed: seen.seed,
                leg: match seen.leg {
                    interface::Leg::Aggregated => crate::Leg::Aggregated,
                    interface::Leg::Prefill => crate::Leg::Prefill,
                    interface::Leg::Decode => crate::Leg::Decode,
                },
                attempt: seen.attempt,
                worker_id: seen.worker_id,
                dp_rank: seen.dp_rank,
                by_policy: seen.by_policy,
                retried: seen.retried,
                status: seen.status,
                ttft_us: seen.ttft_us,
                itl_us: seen.itl_us,
                duration_us: seen.duration_us,
                prompt_tokens: seen.prompt_tokens,
                output_tokens: seen.output_tokens,
                cached_predicted: seen.cached_predicted,
                cached_reported: seen.cached_reported,
            }
        }
    }

    /// One module per world: bindings, conversions, and the macro that implements the exports for a policy
    /// type.
    macro_rules! world {
        (
            $feature:literal, $name:ident, $world:literal, $bindings:literal, $bind:ident, $interface:ident,
            $($function:tt)*
        ) => {
            #[cfg(all(feature = $feature, target_family = "wasm"))]
            #[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
            pub mod $name {
                pub mod bindings {
                    wit_bindgen::generate!({
                        path: "../../wit",
                        world: $world,
                        pub_export_macro: true,
                        default_bindings_module: $bindings,
                    });
                }
                pub use crate::$bind as bind;
                pub use bindings::exports::pointsman::policy::$interface as interface;
                pub use bindings::exports::pointsman::policy::policy as about;
                use bindings::pointsman::policy::types as wit;

                #[must_use]
                pub fn call(call: &wit::Call) -> crate::Call {
                    crate::Call {
                        leg: match call.leg {
                            wit::Leg::Aggregated => crate::Leg::Aggregated,
                            wit::Leg::Prefill => crate::Leg::Prefill,
                            wit::Leg::Decode => crate::Leg::Decode,
                        },
                        attempt: call.attempt,
                        rows: call.rows,
                        seed: call.seed,
                        now_us: call.now_us,
                    }
                }

                #[must_use]
                pub fn error(error: crate::Error) -> wit::Error {
                    match error {
                        crate::Error::Unsupported(text) => wit::Error::Unsupported(text),
                        crate::Error::Internal(text) => wit::Error::Internal(text),
                    }
                }

                $($function)*
            }
        };
    }

    world! { "filter", filter, "filter", "pointsman_policy_sdk::__glue::filter::bindings", __bind_filter, filtering, }

    world! { "scorer", scorer, "scorer", "pointsman_policy_sdk::__glue::scorer::bindings", __bind_scorer, scoring, }

    world! {
        "selector", selector, "selector", "pointsman_policy_sdk::__glue::selector::bindings", __bind_selector, selecting,

        #[must_use]
        pub fn decision(decision: crate::Decision) -> interface::Decision {
            match decision {
                crate::Decision::Choose { row, costs, reason } => {
                    interface::Decision::Choose(interface::Choice { row, costs, reason })
                }
                crate::Decision::Abstain => interface::Decision::Abstain,
                crate::Decision::Shed(shed) => interface::Decision::Shed(wit::ShedReason {
                    status: shed.status,
                    reason: shed.reason,
                }),
            }
        }
    }

    world! {
        "decode-override", decode_override, "decode-override",
        "pointsman_policy_sdk::__glue::decode_override::bindings", __bind_decode_override, disaggregation,

        #[must_use]
        pub fn plan(plan: crate::Plan) -> interface::Plan {
            match plan {
                crate::Plan::Remote => interface::Plan::Remote,
                crate::Plan::Local => interface::Plan::Local,
                crate::Plan::Shed(shed) => interface::Plan::Shed(wit::ShedReason {
                    status: shed.status,
                    reason: shed.reason,
                }),
            }
        }

        #[must_use]
        pub fn over(over: &crate::RouterConfigOverride) -> interface::RouterConfigOverride {
            interface::RouterConfigOverride {
                overlap_score_credit: over.overlap_score_credit,
                prefill_load_scale: over.prefill_load_scale,
                temperature: over.temperature,
                assume_kv_reuse: over.assume_kv_reuse,
                track_prefill_tokens: over.track_prefill_tokens,
                shared_cache_multiplier: over.shared_cache_multiplier,
            }
        }
    }
}

/// Exports of every world: name and version, and `configure`. A second `configure` keeps the first.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_policy {
    ($world:ident, $policy:ty) => {
        use $crate::__glue::$world as glue;

        struct Exports;

        static CONFIGURED: ::std::sync::OnceLock<($policy, usize)> = ::std::sync::OnceLock::new();

        fn configured() -> Result<&'static ($policy, usize), $crate::Error> {
            CONFIGURED.get().ok_or_else(|| $crate::Error::Internal("not configured".into()))
        }

        /// Request facts come first: `split` of them.
        fn facts(split: usize, words: &[u32], rows: u32) -> $crate::Facts<'_> {
            let (request, columns) = words.split_at(split.min(words.len()));
            $crate::Facts::new(request, columns, rows as usize)
        }

        impl glue::about::Guest for Exports {
            fn describe() -> glue::about::About {
                glue::about::About {
                    name: <$policy as $crate::Policy>::NAME.into(),
                    version: match <$policy as $crate::Policy>::VERSION {
                        // Expands in the crate of the policy.
                        "" => env!("CARGO_PKG_VERSION"),
                        own => own,
                    }
                    .into(),
                }
            }

            fn configure(settings: String) -> Result<glue::about::Wants, String> {
                $crate::__glue::report_panics();
                let (policy, wants) = $crate::configure::<$policy>(&settings)?;
                let asked = glue::about::Wants {
                    request_facts: wants.request_names().to_vec(),
                    worker_facts: wants.worker_names().to_vec(),
                };
                let _ = CONFIGURED.set((policy, wants.request_width()));
                Ok(asked)
            }
        }

        $crate::__glue::$world::bindings::export!(Exports with_types_in $crate::__glue::$world::bindings);
    };
}

/// The export `learning`, beside those of a world.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_learning {
    ($policy:ty) => {
        struct Learns;

        impl $crate::__glue::learning::interface::Guest for Learns {
            fn observe(
                now_us: u64,
                seed: u64,
                outcomes: Vec<$crate::__glue::learning::interface::Outcome>,
            ) {
                if let Ok((policy, _)) = configured() {
                    let outcomes: Vec<_> = outcomes.iter().map($crate::__glue::learning::outcome).collect();
                    $crate::Policy::observe(policy, &$crate::Moment { now_us, seed }, &outcomes);
                }
            }
        }

        $crate::__glue::learning::bindings::export!(Learns with_types_in $crate::__glue::learning::bindings);
    };
}

/// Exports of world `filter`.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_filter {
    ($policy:ty) => {
        $crate::__bind_policy!(filter, $policy);

        impl glue::interface::Guest for Exports {
            fn keep(
                call: glue::interface::Call,
                words: Vec<u32>,
            ) -> Result<Vec<u32>, glue::interface::Error> {
                let (policy, split) = configured().map_err(glue::error)?;
                let facts = facts(*split, &words, call.rows);
                $crate::Filter::keep(policy, &glue::call(&call), &facts).map_err(glue::error)
            }
        }
    };
}

/// Exports of world `scorer`.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_scorer {
    ($policy:ty) => {
        $crate::__bind_policy!(scorer, $policy);

        impl glue::interface::Guest for Exports {
            fn score(
                call: glue::interface::Call,
                words: Vec<u32>,
            ) -> Result<Vec<f32>, glue::interface::Error> {
                let (policy, split) = configured().map_err(glue::error)?;
                let facts = facts(*split, &words, call.rows);
                $crate::Scorer::score(policy, &glue::call(&call), &facts).map_err(glue::error)
            }
        }
    };
}

/// Exports of world `selector`.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_selector {
    ($policy:ty) => {
        $crate::__bind_policy!(selector, $policy);

        impl glue::interface::Guest for Exports {
            fn select(
                call: glue::interface::Call,
                words: Vec<u32>,
            ) -> Result<glue::interface::Decision, glue::interface::Error> {
                let (policy, split) = configured().map_err(glue::error)?;
                let facts = facts(*split, &words, call.rows);
                let decision = $crate::Selector::select(policy, &glue::call(&call), &facts);
                decision.map(glue::decision).map_err(glue::error)
            }
        }
    };
}

/// Exports of world `decode-override`.
#[doc(hidden)]
#[macro_export]
macro_rules! __bind_decode_override {
    ($policy:ty) => {
        $crate::__bind_policy!(decode_override, $policy);

        impl glue::interface::Guest for Exports {
            fn decide(
                call: glue::interface::Call,
                request: Vec<u32>,
                decode: Vec<u32>,
                prefill: Vec<u32>,
            ) -> Result<glue::interface::Plan, glue::interface::Error> {
                let (policy, _) = configured().map_err(glue::error)?;
                let decode = $crate::Facts::new(&request, &decode, usize::from(!decode.is_empty()));
                let prefill = $crate::Facts::new(&request, &prefill, call.rows as usize);
                let plan = $crate::DecodeOverride::decide(policy, &glue::call(&call), &decode, &prefill);
                plan.map(glue::plan).map_err(glue::error)
            }

            fn decode_config(
                call: glue::interface::Call,
                words: Vec<u32>,
            ) -> Result<glue::interface::RouterConfigOverride, glue::interface::Error> {
                let (policy, _) = configured().map_err(glue::error)?;
                let facts = $crate::Facts::new(&words, &[], 0);
                let over = $crate::DecodeOverride::decode_config(policy, &glue::call(&call), &facts);
                over.map(|over| glue::over(&over)).map_err(glue::error)
            }
        }
    };
}
