//! Whether a vLLM engine keeps prompts for later ones with the same prefix (F5.5).

use crate::probe::exposition::Sample;

/// Beginnings of the metrics of caches beside the engine's own: LMCache, KV offloading, Mooncake's store.
/// They also serve while the engine's own cache is off.
const OTHER_CACHES: [&str; 4] = ["lmcache", "kv_offload_", "simple_cpu_offload_", "mooncake_store_"];

/// What metrics say of prefix caches.
#[derive(Default)]
pub(super) struct PrefixCaches {
    own: Option<bool>,
    has_other: bool,
}

impl PrefixCaches {
    /// Notes a sample. `name` is without the prefix `vllm:`.
    pub(super) fn note(&mut self, name: &str, sample: &Sample<'_>) {
        self.has_other |= OTHER_CACHES.iter().any(|prefix| name.starts_with(prefix));
        if name == "cache_config_info" {
            let own = match sample.label("enable_prefix_caching") {
                Some("True" | "true") => Some(true),
                Some("False" | "false") => Some(false),
                _ => None,
            };
            // Of several engines behind one address, one may have a cache.
            self.own = self.own.max(own);
        }
    }

    /// Returns whether prefixes are cached; `None`: not known.
    pub(super) fn known(self) -> Option<bool> {
        self.own.filter(|own| *own || !self.has_other)
    }
}

#[cfg(test)]
mod tests {
    use crate::probe::parse::{sglang_facts, vllm_facts};

    #[test]
    fn f5_an_engine_that_says_so_has_no_prefix_cache() {
        let config = |value: &str| format!("vllm:cache_config_info{{enable_prefix_caching=\"{value}\"}} 1\n");
        let known = |metrics: &str| vllm_facts(metrics.as_bytes()).prefix_cache;
        // F5.5
        assert_eq!(known(&config("False")), Some(false));
        assert_eq!(known(&config("False").replace("vllm:", "ray_vllm_")), Some(false));
        assert_eq!(known(&config("True")), Some(true));
        for unknown in ["", "vllm:cache_config_info{block_size=\"16\"} 1\n", &config("None"), &config("0")] {
            assert_eq!(known(unknown), None, "{unknown}");
        }
        assert_eq!(known(&[config("False"), config("True")].concat()), Some(true));
        for other in ["lmcache:num_hit_tokens_total", "vllm:kv_offload_load_bytes_total"] {
            let other = |on| format!("{other} 0\n{}", config(on));
            assert_eq!((known(&other("False")), known(&other("True"))), (None, Some(true)));
        }
        let metrics = include_str!("../../../../../tests/fixtures/engines/metrics.txt");
        assert_eq!(known(metrics), Some(true));
        let sglang = |body: &str| sglang_facts(body.as_bytes()).unwrap().prefix_cache;
        assert_eq!(sglang(r#"{"disable_radix_cache":true}"#), Some(false));
        assert_eq!(sglang(r#"{"disable_radix_cache":null}"#), None);
    }
}
