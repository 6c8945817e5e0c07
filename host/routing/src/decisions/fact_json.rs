//! Recorded facts as JSON: values by the name and type of their fact.

use serde::{Serialize, Serializer};

use crate::{
    encoding::WordReader,
    facts::{FactType, Wants},
};

/// Request facts by name.
pub(super) struct RequestFacts<'a> {
    pub(super) wants: &'a Wants,
    pub(super) words: &'a [u32],
}

impl Serialize for RequestFacts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut words = WordReader(self.words);
        serializer.collect_map(self.wants.request.iter().filter_map(|fact| {
            let low = words.word()?;
            let high = if fact.ty() == FactType::U64 { words.word()? } else { 0 };
            Some((fact.name(), Number { ty: fact.ty(), low, high }))
        }))
    }
}

/// Worker facts by name, one list of values each. Serializes no fact when there are no values.
pub(super) struct WorkerFacts<'a> {
    pub(super) wants: &'a Wants,
    pub(super) words: &'a [u32],
    pub(super) rows: usize,
}

impl Serialize for WorkerFacts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut words = WordReader(self.words);
        serializer.collect_map(self.wants.worker.iter().filter_map(|column| {
            let ty = column.ty();
            let low = words.words(self.rows)?;
            let high = if ty == FactType::U64 { words.words(self.rows)? } else { &[] };
            Some((column.to_string(), Column { ty, low, high }))
        }))
    }
}

struct Column<'a> {
    ty: FactType,
    low: &'a [u32],
    high: &'a [u32],
}

impl Serialize for Column<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let high = self.high.iter().copied().chain(std::iter::repeat(0));
        serializer.collect_seq(self.low.iter().zip(high).map(|(low, high)| Number {
            ty: self.ty,
            low: *low,
            high,
        }))
    }
}

/// One value. A float that is not finite is serialized as its bits.
struct Number {
    ty: FactType,
    low: u32,
    high: u32,
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let single = f32::from_bits(self.low);
        match self.ty {
            FactType::U32 => serializer.serialize_u32(self.low),
            FactType::U64 => serializer.serialize_u64(join_halves(self.low, self.high)),
            FactType::F32 if single.is_finite() => serializer.serialize_f32(single),
            FactType::F32 => serializer.collect_str(&format_args!("0x{:08x}", self.low)),
        }
    }
}

pub(super) fn join_halves(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
