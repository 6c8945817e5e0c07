//! Figures by which an engine reports its work.

/// Amount of work that an engine did since its process began; `None` for figures that it does not report. An
/// engine that makes progress raises one of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineProgress {
    /// Prompt tokens of requests.
    pub(crate) prompt_tokens: Option<u64>,
    /// Generated tokens.
    pub(crate) generation_tokens: Option<u64>,
    /// Requests that ended.
    pub(crate) finished_requests: Option<u64>,
    /// Tokens that steps processed. Only SGLang reports it, and counts the tokens above only when a request
    /// ends.
    pub(crate) step_tokens: Option<u64>,
}

impl EngineProgress {
    fn all(&self) -> [Option<u64>; 4] {
        [self.prompt_tokens, self.generation_tokens, self.finished_requests, self.step_tokens]
    }

    /// Returns whether the engine reports any of the figures.
    pub(crate) fn is_known(&self) -> bool {
        self.all().iter().any(Option::is_some)
    }

    /// Returns whether a figure is lower than it was: the engine has begun to count again.
    pub(crate) fn is_behind(&self, earlier: &Self) -> bool {
        self.all()
            .into_iter()
            .zip(earlier.all())
            .any(|(now, before)| now.zip(before).is_some_and(|(now, before)| now < before))
    }
}

/// The figures of an engine that move while it works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EngineSigns {
    /// Its progress so far.
    pub(crate) progress: EngineProgress,
    /// Use of the KV cache, a share. It moves during a long prefill.
    pub(crate) kv_usage: Option<f32>,
    /// Tokens in the KV cache. Only SGLang reports it, and rounds the share above to hundredths.
    pub(crate) kv_tokens: Option<u64>,
    /// Whether requests run.
    pub(crate) is_running: bool,
}

impl EngineSigns {
    /// Returns whether a figure changed since the `earlier` reading.
    pub(crate) fn moved_since(&self, earlier: &Self) -> bool {
        let figures = |signs: &Self| (signs.progress, signs.kv_usage, signs.kv_tokens);
        figures(self) != figures(earlier)
    }

    /// Returns whether the engine reports no count that moves while it works, but that requests run. A
    /// request that hangs runs, too. The share of the cache in use is not a count: it may be rounded, or
    /// always 0.
    pub(crate) fn tells_only_that_requests_run(&self) -> bool {
        self.is_running && !self.progress.is_known() && self.kv_tokens.is_none()
    }
}
