//! Names of files that commands write.

use std::path::PathBuf;

/// Reads the name of a file to write to.
///
/// # Errors
/// It is `-`, with which other programs mean standard output.
pub fn output_file(text: &str) -> Result<PathBuf, String> {
    match text {
        "-" => Err("name a file: standard output gets a summary of it".to_owned()),
        _ => Ok(text.into()),
    }
}
