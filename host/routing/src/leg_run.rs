//! The run of one leg of a request, as receipts and records of decisions tell it.

/// The run of one leg. Times are microseconds since the first byte of the request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegRun {
    /// When it was sent last.
    pub sent: u32,
    /// When it ended.
    pub ended: Option<u32>,
    /// Why it failed.
    pub failure: Option<LegFailure>,
}

/// Why a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegFailure {
    /// Kind of the error, as in `pointsman_legs_total`.
    pub kind: &'static str,
    /// HTTP status of the engine's answer, if the engine answered with an error.
    pub status: Option<u16>,
}
