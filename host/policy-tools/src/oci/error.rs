//! Errors of pushing and pulling.

use std::path::PathBuf;

/// Reason why an artifact could not be written or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OciError {
    /// The directory is in use for something else.
    #[error(
        "{0} is not an OCI image layout: it has no file oci-layout; name an empty directory to create one"
    )]
    NotALayout(PathBuf),
    /// A file could not be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// A file or response has the wrong form.
    #[error("{place}: {problem}")]
    Malformed {
        /// File or URL.
        place: String,
        problem: String,
    },
    /// The layout has no manifest with this tag.
    #[error("{layout} has no tag \"{tag}\"; its tags: {tags}")]
    NoTag { tag: String, layout: PathBuf, tags: String },
    /// A digest that is not `sha256:` and 64 lower case hexadecimal digits.
    #[error("\"{0}\" is not a sha256 digest")]
    InvalidDigest(String),
    /// Content that does not match its digest.
    #[error("the content of {expected} has the digest {found}; it was changed or cut")]
    WrongDigest { expected: String, found: String },
    /// Content that does not match its size.
    #[error("{digest} has {found} bytes, its descriptor says {expected}; it was changed or cut")]
    WrongSize { digest: String, found: u64, expected: u64 },
    /// Content above the limit.
    #[error("{what} has {size} bytes; the limit is {limit}")]
    TooLarge { what: String, size: u64, limit: u64 },
}
