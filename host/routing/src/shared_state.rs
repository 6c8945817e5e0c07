//! Changes of policies' state that the gateways of a fleet send each other.
//!
//! A key is either a value, of which the last write counts, or a number that every gateway adds to. Each
//! gateway sends only its own part of a number, so that concurrent additions are never lost.

/// When a key was last written or removed as a whole, and by whom. The larger stamp wins; the writer decides
/// between equal times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Microseconds since the Unix epoch, of the writer's clock.
    pub time_us: u64,
    /// The gateway.
    pub writer: u64,
}

/// Value of one key as a gateway sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    /// The key.
    pub key: String,
    /// Last write of the whole key. Parts of a number carry the stamp that they add to.
    pub stamp: Stamp,
    /// Value of the key.
    pub content: SharedContent,
}

/// Value of a shared key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedContent {
    /// A value.
    Value {
        /// Its bytes.
        value: Vec<u8>,
        /// Milliseconds since the Unix epoch; `u64::MAX`: never.
        expires_ms: u64,
    },
    /// The key was removed.
    Deleted,
    /// Sum that one gateway added to a number.
    Part {
        /// The gateway.
        writer: u64,
        /// When its process began. It distinguishes what the gateway added before a restart.
        incarnation: u64,
        /// Sum of its additions.
        sum: i64,
        /// Milliseconds since the Unix epoch; `u64::MAX`: never.
        expires_ms: u64,
    },
}

/// Why a change of another gateway is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// The key or the value is longer than the limits allow.
    #[error("a key or value is too long")]
    TooLong,
    /// The state has no room.
    #[error("the state's quota is used up")]
    NoRoom,
    /// The writer's clock is ahead.
    #[error("the clock of the gateway is more than 10 s ahead")]
    ClockAhead,
    /// More gateways add to the number than are counted.
    #[error("too many gateways add to one number")]
    TooManyParts,
}

/// The part of one slot's state that is sent to other gateways.
pub trait SharedState: std::fmt::Debug + Send + Sync {
    /// Begins to note changes, in the name of a gateway whose process began at `incarnation`.
    fn share(&self, writer: u64, incarnation: u64);

    /// Returns whether the operator wants it shared at present.
    fn is_shared(&self) -> bool;

    /// Takes up to `most` noted changes. A key that changed several times is sent once.
    fn take_changes(&self, most: usize) -> Vec<StateChange>;

    /// Notes everything that this gateway wrote, because a new connection does not know what was sent before.
    fn note_all(&self);

    /// Notes one key again, whose change could not be sent.
    fn note_again(&self, key: &str);

    /// Applies a change of any gateway, also one that this gateway sent before a restart.
    ///
    /// # Errors
    /// [`ChangeRefused`], and nothing is changed.
    fn apply(&self, change: StateChange, now_ms: u64) -> Result<(), ChangeRefused>;
}
