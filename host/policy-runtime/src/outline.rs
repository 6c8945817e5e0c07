//! Facts about a component that follow from its types.

use std::collections::BTreeSet;

use pointsman_routing::World;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::access::Grant;

/// Worlds, imports and exports of a component. The compiler process sends it to the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outline {
    #[serde(deserialize_with = "world")]
    pub(crate) world: World,
    pub(crate) imports: BTreeSet<String>,
    pub(crate) exports: BTreeSet<String>,
    /// Contract version that it was built against.
    pub(crate) version: String,
    /// Whether it imports WASI.
    pub(crate) wasi: bool,
    /// Whether it exports `learning`.
    pub(crate) learns: bool,
    /// Grants that its imports need.
    pub(crate) needs: Vec<Grant>,
}

fn world<'de, D: Deserializer<'de>>(deserializer: D) -> Result<World, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "filter" => Ok(World::Filter),
        "scorer" => Ok(World::Scorer),
        "selector" => Ok(World::Selector),
        "decode-override" => Ok(World::DecodeOverride),
        other => Err(D::Error::custom(format!("`{other}` is not a world"))),
    }
}
