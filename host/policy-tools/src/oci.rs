//! An OCI image layout folder with policies in the form of Wasm artifacts: one layer a policy, named by a tag.
//!
//! Knows blobs, manifests and tags; what a policy is it is told. Every blob is read against the digest and size that name it.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use pointsman_policy_runtime::digest;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
const WASM: &str = "application/wasm";
/// Where the index says which tag a manifest has.
const TAG: &str = "org.opencontainers.image.ref.name";
/// The policy's name.
const NAME: &str = "dev.pointsman.policy.name";
/// The text of a minisign signature. An annotation, for a Wasm artifact has one layer.
const SIGNATURE: &str = "dev.pointsman.policy.minisig";
/// Largest blob that is read.
const LARGEST: u64 = 256 << 20;

/// A policy as an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Artifact {
    /// The component.
    pub(crate) wasm: Vec<u8>,
    /// The text of its signature file.
    pub(crate) signature: Option<String>,
    /// What the policy says of itself.
    pub(crate) told: Told,
}

/// What a policy says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) world: String,
    pub(crate) imports: Vec<String>,
    pub(crate) exports: Vec<String>,
}

/// An image layout.
#[derive(Debug)]
pub(crate) struct Layout(PathBuf);

/// Why nothing was written or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OciError {
    /// The folder is something else.
    #[error("{0}: no OCI image layout (there is no file oci-layout)")]
    NoLayout(PathBuf),
    /// A file could not be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// A file is not what it should be.
    #[error("{0}: {1}")]
    Malformed(PathBuf, String),
    /// Nothing has this tag.
    #[error("there is no tag `{0}` in {1}; tags are: {2}")]
    NoTag(String, PathBuf, String),
    /// A blob is not what its name says.
    #[error("blob {named}: its content has the digest sha256:{found}; it was changed or cut")]
    WrongDigest {
        /// The name.
        named: String,
        /// What is there.
        found: String,
    },
    /// A blob has another size than its descriptor says.
    #[error("blob {0}: {1} bytes, not {2} as its descriptor says")]
    WrongSize(String, u64, u64),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

impl Descriptor {
    fn tag(&self) -> Option<&str> {
        self.rest.get("annotations")?.get(TAG)?.as_str()
    }
}

impl Layout {
    /// A layout that is there.
    pub(crate) fn open(folder: &Path) -> Result<Self, OciError> {
        if folder.join("oci-layout").is_file() {
            Ok(Self(folder.to_owned()))
        } else {
            Err(OciError::NoLayout(folder.to_owned()))
        }
    }

    /// A layout that is there, or a new one in a folder that is empty or not there.
    pub(crate) fn create(folder: &Path) -> Result<Self, OciError> {
        let used = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
        if used {
            return Self::open(folder);
        }
        let layout = Self(folder.to_owned());
        layout.write(
            Path::new("index.json"),
            &to_vec(&json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [] })),
        )?;
        layout.write(Path::new("oci-layout"), &to_vec(&json!({ "imageLayoutVersion": "1.0.0" })))?;
        Ok(layout)
    }

    /// Puts an artifact in under a tag, which no other keeps; answers the manifest's digest. The same artifact is always the same bytes.
    pub(crate) fn push(&self, tag: &str, artifact: &Artifact) -> Result<String, OciError> {
        let Artifact { wasm, signature, told } = artifact;
        let layer = self.blob(WASM, wasm)?;
        let config = json!({
            "created": "1970-01-01T00:00:00Z", "architecture": "wasm", "os": "wasip2", "layerDigests": [layer.digest],
            "component": { "exports": told.exports, "imports": told.imports },
        });
        let config = self.blob(CONFIG, &to_vec(&config))?;
        let mut annotations = json!({
            NAME: told.name, "dev.pointsman.policy.version": told.version, "dev.pointsman.policy.world": told.world,
            "org.opencontainers.image.title": told.name, "org.opencontainers.image.version": told.version,
        });
        if let (Some(signature), Some(map)) = (signature, annotations.as_object_mut()) {
            map.insert(SIGNATURE.to_owned(), json!(signature));
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer], "annotations": annotations,
        });
        let mut manifest = self.blob(MANIFEST, &to_vec(&manifest))?;
        let digest = manifest.digest.clone();
        manifest.rest.insert("annotations".to_owned(), json!({ TAG: tag }));
        let mut index = self.index()?;
        index.manifests.retain(|other| other.tag() != Some(tag));
        index.manifests.push(manifest);
        self.write(Path::new("index.json"), &to_vec(&json!(index)))?;
        Ok(digest)
    }

    /// Takes the artifact of a tag out, with every digest checked.
    pub(crate) fn pull(&self, tag: &str) -> Result<Artifact, OciError> {
        let index = self.index()?;
        let found = index.manifests.iter().find(|manifest| manifest.tag() == Some(tag));
        let descriptor = found.ok_or_else(|| {
            let tags: Vec<&str> = index.manifests.iter().filter_map(Descriptor::tag).collect();
            let tags = if tags.is_empty() { "none".to_owned() } else { tags.join(", ") };
            OciError::NoTag(tag.to_owned(), self.0.clone(), tags)
        })?;
        let malformed = |problem: String| OciError::Malformed(self.0.join(&descriptor.digest), problem);
        let manifest: Manifest =
            serde_json::from_slice(&self.read(descriptor)?).map_err(|error| malformed(error.to_string()))?;
        if manifest.config.media_type != CONFIG {
            let found = manifest.config.media_type;
            return Err(malformed(format!("no Wasm artifact: its config is `{found}`, not `{CONFIG}`")));
        }
        let layer = match manifest.layers.as_slice() {
            [layer] if layer.media_type == WASM => layer,
            _ => return Err(malformed(format!("not one layer of `{WASM}`"))),
        };
        self.read(&manifest.config)?;
        let said = |key: &str| manifest.annotations.get(key).cloned().unwrap_or_default();
        let told = Told {
            name: said(NAME),
            version: said("dev.pointsman.policy.version"),
            world: said("dev.pointsman.policy.world"),
            ..Told::default()
        };
        let signature = manifest.annotations.get(SIGNATURE).cloned();
        Ok(Artifact { wasm: self.read(layer)?, signature, told })
    }

    fn index(&self) -> Result<Index, OciError> {
        let path = self.0.join("index.json");
        let bytes = fs::read(&path).map_err(|error| OciError::Io(path.clone(), error))?;
        serde_json::from_slice(&bytes).map_err(|error| OciError::Malformed(path, error.to_string()))
    }

    fn blob(&self, media_type: &str, bytes: &[u8]) -> Result<Descriptor, OciError> {
        let hex = digest(bytes).to_string();
        self.write(&Path::new("blobs/sha256").join(&hex), bytes)?;
        let (media_type, digest) = (media_type.to_owned(), format!("sha256:{hex}"));
        Ok(Descriptor { media_type, digest, size: bytes.len() as u64, rest: serde_json::Map::new() })
    }

    /// Reads a blob. Its name is a stranger's: only the digits of a digest become part of a path.
    fn read(&self, descriptor: &Descriptor) -> Result<Vec<u8>, OciError> {
        let named = descriptor.digest.clone();
        let hex = named.strip_prefix("sha256:").filter(|hex| {
            hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        });
        let Some(hex) = hex else {
            return Err(OciError::Malformed(self.0.clone(), format!("`{named}` is no sha256 digest")));
        };
        let path = self.0.join("blobs/sha256").join(hex);
        let io = |error| OciError::Io(path.clone(), error);
        let size = fs::metadata(&path).map_err(io)?.len();
        if size != descriptor.size || size > LARGEST {
            return Err(OciError::WrongSize(named, size, descriptor.size.min(LARGEST)));
        }
        let bytes = fs::read(&path).map_err(io)?;
        let found = digest(&bytes).to_string();
        if found == hex { Ok(bytes) } else { Err(OciError::WrongDigest { named, found }) }
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), OciError> {
        let path = self.0.join(path);
        replace(&path, bytes).map_err(|error| OciError::Io(path, error))
    }
}

/// Writes a file whole or not at all, making its folder.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let staged = folder.join(format!(".{name}.{}", std::process::id()));
    let mut file = fs::File::create(&staged)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&staged, path)
}

fn to_vec(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(wasm: &[u8], signature: Option<&str>) -> Artifact {
        let told =
            Told { name: "p".into(), version: "1.0.0".into(), world: "selector".into(), ..Told::default() };
        Artifact { wasm: wasm.to_vec(), signature: signature.map(str::to_owned), told }
    }

    #[test]
    fn what_was_pushed_is_pulled_and_a_tag_names_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::create(&folder.path().join("new/layout")).unwrap();
        let (one, two) = (artifact(b"one", None), artifact(b"two", Some("untrusted comment: x\nabc\n")));
        let first = layout.push("a", &one).unwrap();
        layout.push("b", &two).unwrap();
        assert_eq!((layout.pull("a").unwrap(), layout.pull("b").unwrap()), (one.clone(), two.clone()));
        assert_eq!(layout.push("a", &one).unwrap(), first, "the same bytes again");
        layout.push("a", &two).unwrap();
        let again = Layout::create(&folder.path().join("new/layout")).unwrap();
        assert_eq!((again.pull("a").unwrap(), again.index().unwrap().manifests.len()), (two, 2));
        let error = layout.pull("c").unwrap_err().to_string();
        assert!(error.contains("no tag `c`") && error.ends_with("tags are: b, a"), "{error}");
    }

    #[test]
    fn a_blob_that_was_changed_or_cut_is_refused_whichever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::create(folder.path()).unwrap();
        layout.push("a", &artifact(b"the policy", None)).unwrap();
        let blobs = fs::read_dir(folder.path().join("blobs/sha256")).unwrap();
        let blobs: Vec<PathBuf> = blobs.map(|blob| blob.unwrap().path()).collect();
        assert_eq!(blobs.len(), 3, "manifest, config, layer");
        for blob in blobs {
            let whole = fs::read(&blob).unwrap();
            let mut changed = whole.clone();
            changed[3] ^= 1;
            fs::write(&blob, &changed).unwrap();
            assert!(matches!(layout.pull("a"), Err(OciError::WrongDigest { .. })), "{blob:?}");
            fs::write(&blob, &whole[1..]).unwrap();
            assert!(matches!(layout.pull("a"), Err(OciError::WrongSize(..))), "{blob:?}");
            fs::write(&blob, whole).unwrap();
        }
        layout.pull("a").unwrap();
    }

    #[test]
    fn a_digest_that_is_a_path_reads_nothing_and_other_folders_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::create(folder.path()).unwrap();
        let evil = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": MANIFEST, "digest": "sha256:../../../etc/passwd", "size": 1, "annotations": { TAG: "a" },
        }] });
        fs::write(folder.path().join("index.json"), evil.to_string()).unwrap();
        assert!(layout.pull("a").unwrap_err().to_string().contains("is no sha256 digest"));
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("mine"), "").unwrap();
        assert!(matches!(Layout::create(other.path()), Err(OciError::NoLayout(_))));
    }
}
