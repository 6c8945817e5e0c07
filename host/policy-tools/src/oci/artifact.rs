//! A policy as a Wasm OCI artifact, in the layout of the CNCF: a config that describes the component, one
//! layer with the component, and a manifest whose annotations carry the policy's name and signature.
//!
//! Image layouts and registries store the same bytes, so a policy has the same manifest digest in both.

use std::collections::BTreeMap;

use pointsman_policy_runtime::digest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::error::OciError;

/// Media type of an image manifest.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of the config, which marks the artifact as a Wasm component.
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
/// Media type of the component.
const WASM: &str = "application/wasm";
/// Name of the policy.
const NAME: &str = "dev.pointsman.policy.name";
const VERSION: &str = "dev.pointsman.policy.version";
const WORLD: &str = "dev.pointsman.policy.world";
/// Text of the policy's minisign signature. It is an annotation because a Wasm artifact has exactly one
/// layer.
const SIGNATURE: &str = "dev.pointsman.policy.minisig";

/// Largest config or component that is read, bytes.
pub(crate) const MAX_BLOB_BYTES: u64 = 256 << 20;

/// Manifests of an index that a message names.
const MAX_NAMED: usize = 3;

/// A policy with its signature and metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Artifact {
    /// The component.
    pub(crate) wasm: Vec<u8>,
    /// Text of the signature file.
    pub(crate) signature: Option<String>,
    pub(crate) metadata: Metadata,
}

/// Metadata of a policy, as the policy reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) world: String,
    pub(crate) imports: Vec<String>,
    pub(crate) exports: Vec<String>,
}

/// The three blobs of an artifact.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub(crate) layer: Blob,
    pub(crate) config: Blob,
    pub(crate) manifest: Blob,
}

/// Content and its descriptor.
#[derive(Debug)]
pub(crate) struct Blob {
    pub(crate) descriptor: Descriptor,
    pub(crate) bytes: Vec<u8>,
}

/// Media type, digest and size of a blob.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(flatten)]
    pub(crate) rest: Map<String, Value>,
}

/// The parts of an image manifest that a policy needs.
#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// An image index, which lists manifests, for example one for each platform.
#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

impl Artifact {
    /// Encodes the artifact. Equal artifacts give equal bytes.
    pub(crate) fn encode(&self) -> Encoded {
        let Metadata { name, version, world, imports, exports } = &self.metadata;
        let layer = Blob::new(WASM, self.wasm.clone());
        let config = json!({
            "created": "1970-01-01T00:00:00Z", "architecture": "wasm", "os": "wasip2",
            "layerDigests": [layer.descriptor.digest],
            "component": { "exports": exports, "imports": imports },
        });
        let config = Blob::new(CONFIG, config.to_string().into_bytes());
        let mut annotations = json!({
            NAME: name, VERSION: version, WORLD: world,
            "org.opencontainers.image.title": name, "org.opencontainers.image.version": version,
        });
        if let (Some(signature), Some(map)) = (&self.signature, annotations.as_object_mut()) {
            map.insert(SIGNATURE.to_owned(), json!(signature));
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config.descriptor, "layers": [layer.descriptor],
            "annotations": annotations,
        });
        let manifest = Blob::new(MANIFEST, manifest.to_string().into_bytes());
        Encoded { layer, config, manifest }
    }
}

impl Blob {
    fn new(media_type: &str, bytes: Vec<u8>) -> Self {
        let digest = format!("sha256:{}", digest(&bytes));
        let size = bytes.len() as u64;
        Self {
            descriptor: Descriptor { media_type: media_type.to_owned(), digest, size, rest: Map::new() },
            bytes,
        }
    }
}

impl Descriptor {
    /// Returns the hexadecimal digits of the digest. The digest is foreign input that becomes part of a path,
    /// so anything but 64 lower case digits is an error.
    pub(crate) fn hex(&self) -> Result<&str, OciError> {
        let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let hex = self.digest.strip_prefix("sha256:");
        let hex = hex.filter(|hex| hex.len() == 64 && hex.bytes().all(digit));
        hex.ok_or_else(|| OciError::InvalidDigest(self.digest.clone()))
    }

    /// Returns the size if it is within the limit for blobs.
    pub(crate) fn bounded_size(&self) -> Result<u64, OciError> {
        if self.size <= MAX_BLOB_BYTES {
            return Ok(self.size);
        }
        Err(OciError::TooLarge {
            what: format!("blob {}", self.digest),
            size: self.size,
            limit: MAX_BLOB_BYTES,
        })
    }

    /// Checks content against size and digest.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), OciError> {
        if bytes.len() as u64 != self.size {
            let found = bytes.len() as u64;
            return Err(OciError::WrongSize { digest: self.digest.clone(), found, expected: self.size });
        }
        let found = digest(bytes).to_string();
        if found == self.hex()? {
            return Ok(());
        }
        Err(OciError::WrongDigest { expected: self.digest.clone(), found: format!("sha256:{found}") })
    }
}

impl Manifest {
    /// Parses a manifest and checks that it is a Wasm artifact.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if let Ok(Index { manifests }) = serde_json::from_slice(bytes) {
            let digests = manifests.iter().filter(|one| one.hex().is_ok()).map(|one| one.digest.as_str());
            let digests = digests.take(MAX_NAMED).collect::<Vec<_>>().join(", ");
            return Err(format!("it is an image index; name one of its manifests by digest: {digests}"));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if manifest.config.media_type != CONFIG {
            let found = &manifest.config.media_type;
            return Err(format!(
                "the config has the media type \"{found}\"; a Wasm artifact has \"{CONFIG}\""
            ));
        }
        manifest.layer()?;
        Ok(manifest)
    }

    /// Returns the descriptor of the component.
    pub(crate) fn layer(&self) -> Result<&Descriptor, String> {
        match self.layers.as_slice() {
            [layer] if layer.media_type == WASM => Ok(layer),
            layers => Err(format!("{} layers; a Wasm artifact has one, of \"{WASM}\"", layers.len())),
        }
    }

    /// Combines the manifest with the component.
    pub(crate) fn into_artifact(mut self, wasm: Vec<u8>) -> Artifact {
        let mut take = |key: &str| self.annotations.remove(key);
        let signature = take(SIGNATURE);
        let metadata = Metadata {
            name: take(NAME).unwrap_or_default(),
            version: take(VERSION).unwrap_or_default(),
            world: take(WORLD).unwrap_or_default(),
            ..Metadata::default()
        };
        Artifact { wasm, signature, metadata }
    }
}
