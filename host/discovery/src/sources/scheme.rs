//! Scheme of the URLs of workers whose source gives only their addresses.

use std::{fmt, str::FromStr};

/// Scheme of the URLs of workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    /// Without TLS.
    #[default]
    Http,
    /// With TLS.
    Https,
}

impl Scheme {
    /// Returns the URL of a worker.
    pub(crate) fn url(self, host: &str, port: u16) -> String {
        // An IPv6 address.
        if host.contains(':') {
            format!("{self}://[{host}]:{port}")
        } else {
            format!("{self}://{host}:{port}")
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "http",
            Self::Https => "https",
        })
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(format!("`{text}`: expected http or https")),
        }
    }
}
