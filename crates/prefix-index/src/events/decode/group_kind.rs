//! Part of a prompt that a cache group of a hybrid model keeps, by vLLM's `kv_cache_spec_kind`.

use super::value::Value;

/// Part of a prompt that a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token: full attention and MLA.
    Full,
    /// The last tokens, this many: attention with a sliding window.
    Window(u32),
    /// One state for all tokens up to the end of a block: Mamba and other recurrent layers.
    State,
    /// Anything else. The index does not know how many blocks of it the engine needs to continue.
    Other,
}

/// A kind by its name alone.
#[derive(Clone, Copy)]
pub(super) enum Named {
    Full,
    Window,
    State,
    /// The engine itself does not know.
    Unknown,
    Other,
}

impl Named {
    /// Reads a kind. Newer engines may give it any form.
    pub(super) fn of(kind: Value<'_>) -> Option<Self> {
        let Value::Text(name) = kind else { return None };
        Some(match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "sliding_window" | "sliding_window_mla" => Self::Window,
            "mamba" => Self::State,
            "unknown" => Self::Unknown,
            _ => Self::Other,
        })
    }

    /// Returns the kind of a group that has this name, and a window if it has one.
    pub(super) fn group_kind(self, window: Option<u32>) -> Option<GroupKind> {
        match (self, window) {
            (Self::Unknown, _) => None,
            (Self::Full, _) => Some(GroupKind::Full),
            (Self::State, _) => Some(GroupKind::State),
            (Self::Window, Some(tokens)) if tokens > 0 => Some(GroupKind::Window(tokens)),
            (Self::Window | Self::Other, _) => Some(GroupKind::Other),
        }
    }
}
