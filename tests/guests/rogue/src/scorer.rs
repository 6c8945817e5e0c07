//! As a scorer: every row costs nothing until it is due.

#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit", world: "scorer" });
}

use bindings::exports::pointsman::policy::scoring::{Call, Error, Guest};

use crate::script::{due, introduce, misbehave};

struct Rogue;

introduce!();

impl Guest for Rogue {
    fn score(call: Call, _: Vec<u32>) -> Result<Vec<f32>, Error> {
        let deed = due();
        misbehave(deed).map_err(Error::Internal)?;
        let rows = call.rows as usize;
        Ok(match deed {
            "nan" => vec![f32::NAN; rows],
            "infinite" => vec![f32::INFINITY; rows],
            "short" => vec![0.0; rows.saturating_sub(1)],
            "huge" => vec![0.0; 1 << 18],
            _ => vec![0.0; rows],
        })
    }
}

#[allow(unsafe_code, reason = "generated")]
mod export {
    use super::{Rogue, bindings};

    bindings::export!(Rogue with_types_in bindings);
}
