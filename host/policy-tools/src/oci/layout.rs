//! An OCI image layout on disk: a directory of blobs, with an index that names manifests by tag.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    artifact::{Artifact, Blob, Descriptor, Manifest},
    error::OciError,
};
use crate::staged::replace;

/// Media type of the index.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Annotation of a manifest in the index: its tag.
const TAG: &str = "org.opencontainers.image.ref.name";

/// An OCI image layout.
#[derive(Debug)]
pub(crate) struct Layout(PathBuf);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Layout {
    /// Opens an existing layout.
    pub(crate) fn open(directory: &Path) -> Result<Self, OciError> {
        if directory.join("oci-layout").is_file() {
            Ok(Self(directory.to_owned()))
        } else {
            Err(OciError::NotALayout(directory.to_owned()))
        }
    }

    /// Opens an existing layout, or creates one in a directory that is empty or does not exist.
    pub(crate) fn create(directory: &Path) -> Result<Self, OciError> {
        let used = fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some());
        if used {
            return Self::open(directory);
        }
        let layout = Self(directory.to_owned());
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [] });
        layout.write(Path::new("index.json"), index.to_string().as_bytes())?;
        let version = json!({ "imageLayoutVersion": "1.0.0" });
        layout.write(Path::new("oci-layout"), version.to_string().as_bytes())?;
        Ok(layout)
    }

    /// Stores an artifact under a tag, moving the tag if it is in use, and returns the manifest's digest.
    pub(crate) fn push(&self, tag: &str, artifact: &Artifact) -> Result<String, OciError> {
        let encoded = artifact.encode();
        for Blob { descriptor, bytes } in [&encoded.layer, &encoded.config, &encoded.manifest] {
            self.write(&Path::new("blobs/sha256").join(descriptor.hex()?), bytes)?;
        }
        let mut manifest = encoded.manifest.descriptor;
        let digest = manifest.digest.clone();
        manifest.rest.insert("annotations".to_owned(), json!({ TAG: tag }));
        let mut index = self.index()?;
        index.manifests.retain(|other| tag_of(other) != Some(tag));
        index.manifests.push(manifest);
        self.write(Path::new("index.json"), json!(index).to_string().as_bytes())?;
        Ok(digest)
    }

    /// Reads the artifact of a tag and checks every digest.
    pub(crate) fn pull(&self, tag: &str) -> Result<Artifact, OciError> {
        let index = self.index()?;
        let found = index.manifests.iter().find(|manifest| tag_of(manifest) == Some(tag));
        let descriptor = found.ok_or_else(|| {
            let tags: Vec<&str> = index.manifests.iter().filter_map(tag_of).collect();
            let tags = if tags.is_empty() { "none".to_owned() } else { tags.join(", ") };
            OciError::NoTag { tag: tag.to_owned(), layout: self.0.clone(), tags }
        })?;
        let malformed = |problem: String| OciError::Malformed {
            place: format!("{}: manifest {}", self.0.display(), descriptor.digest),
            problem,
        };
        let manifest = Manifest::parse(&self.read(descriptor)?).map_err(malformed)?;
        self.read(&manifest.config)?;
        let wasm = self.read(manifest.layer().map_err(malformed)?)?;
        Ok(manifest.into_artifact(wasm))
    }

    fn index(&self) -> Result<Index, OciError> {
        let path = self.0.join("index.json");
        let bytes = fs::read(&path).map_err(|error| OciError::Io(path.clone(), error))?;
        serde_json::from_slice(&bytes).map_err(|error| OciError::Malformed {
            place: path.display().to_string(),
            problem: error.to_string(),
        })
    }

    fn read(&self, descriptor: &Descriptor) -> Result<Vec<u8>, OciError> {
        let path = self.0.join("blobs/sha256").join(descriptor.hex()?);
        let io = |error| OciError::Io(path.clone(), error);
        let (found, expected) = (fs::metadata(&path).map_err(io)?.len(), descriptor.bounded_size()?);
        if found != expected {
            return Err(OciError::WrongSize { digest: descriptor.digest.clone(), found, expected });
        }
        let bytes = fs::read(&path).map_err(io)?;
        descriptor.check(&bytes)?;
        Ok(bytes)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), OciError> {
        let path = self.0.join(path);
        replace(&path, bytes).map_err(|error| OciError::Io(path, error))
    }
}

fn tag_of(manifest: &Descriptor) -> Option<&str> {
    manifest.rest.get("annotations")?.get(TAG)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::{
        super::artifact::{MANIFEST, Metadata},
        *,
    };

    fn artifact(wasm: &[u8], signature: Option<&str>) -> Artifact {
        let metadata = Metadata {
            name: "p".into(),
            version: "1.0.0".into(),
            world: "selector".into(),
            ..Metadata::default()
        };
        Artifact { wasm: wasm.to_vec(), signature: signature.map(str::to_owned), metadata }
    }

    #[test]
    fn pull_returns_what_was_pushed_last_under_a_tag() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::create(&directory.path().join("new/layout")).unwrap();
        let (one, two) = (artifact(b"one", None), artifact(b"two", Some("untrusted comment: x\nabc\n")));
        let first = layout.push("a", &one).unwrap();
        layout.push("b", &two).unwrap();
        assert_eq!((layout.pull("a").unwrap(), layout.pull("b").unwrap()), (one.clone(), two.clone()));
        assert_eq!(layout.push("a", &one).unwrap(), first, "the same bytes again");
        layout.push("a", &two).unwrap();
        let again = Layout::create(&directory.path().join("new/layout")).unwrap();
        assert_eq!((again.pull("a").unwrap(), again.index().unwrap().manifests.len()), (two, 2));
        let error = layout.pull("c").unwrap_err().to_string();
        assert!(error.contains("has no tag \"c\"") && error.ends_with("its tags: b, a"), "{error}");
    }

    #[test]
    fn every_changed_or_cut_blob_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::create(directory.path()).unwrap();
        layout.push("a", &artifact(b"the policy", None)).unwrap();
        let blobs = fs::read_dir(directory.path().join("blobs/sha256")).unwrap();
        let blobs: Vec<PathBuf> = blobs.map(|blob| blob.unwrap().path()).collect();
        assert_eq!(blobs.len(), 3, "manifest, config, layer");
        for blob in blobs {
            let whole = fs::read(&blob).unwrap();
            let mut changed = whole.clone();
            changed[3] ^= 1;
            fs::write(&blob, &changed).unwrap();
            assert!(matches!(layout.pull("a"), Err(OciError::WrongDigest { .. })), "{blob:?}");
            fs::write(&blob, &whole[1..]).unwrap();
            assert!(matches!(layout.pull("a"), Err(OciError::WrongSize { .. })), "{blob:?}");
            fs::write(&blob, whole).unwrap();
        }
        layout.pull("a").unwrap();
    }

    #[test]
    fn a_digest_with_a_path_is_refused_and_other_directories_stay_untouched() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::create(directory.path()).unwrap();
        let evil = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": MANIFEST, "digest": "sha256:../../../etc/passwd", "size": 1, "annotations": { TAG: "a" },
        }] });
        fs::write(directory.path().join("index.json"), evil.to_string()).unwrap();
        assert!(layout.pull("a").unwrap_err().to_string().contains("is not a sha256 digest"));
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("mine"), "").unwrap();
        assert!(matches!(Layout::create(other.path()), Err(OciError::NotALayout(_))));
    }
}
