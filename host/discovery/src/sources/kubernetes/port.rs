//! Ports of the workers of a pod.

/// Maximum number of workers in a pod.
const MAX_PORTS: usize = 64;

/// Port of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOfWorker {
    /// This number.
    Number(u16),
    /// The port of this name.
    Name(String),
}

impl PortOfWorker {
    /// Reads a list of numbers and names, with commas between them.
    ///
    /// # Errors
    /// The entry that is neither.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, String> {
        let one = |entry: &str| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            if entry.is_empty() || !entry.bytes().all(fits) {
                return Err(format!(
                    "`{entry}` is not a port: expected a number, or a name of letters, digits and `-`"
                ));
            }
            match entry.parse::<u16>() {
                Ok(0) => Err("`0` is not a port: expected 1 to 65535".to_owned()),
                Ok(number) => Ok(Self::Number(number)),
                Err(_) if entry.bytes().all(|byte| byte.is_ascii_digit()) => {
                    Err(format!("`{entry}` is not a port: expected 1 to 65535"))
                }
                Err(_) => Ok(Self::Name(entry.to_owned())),
            }
        };
        let ports: Vec<Self> = text.split(',').map(str::trim).map(one).collect::<Result<_, _>>()?;
        if ports.len() > MAX_PORTS {
            return Err(format!("{} ports: at most {MAX_PORTS} are allowed", ports.len()));
        }
        match ports
            .iter()
            .enumerate()
            .find(|(at, port)| ports.get(..*at).is_some_and(|all| all.contains(port)))
        {
            Some(_) => Err(format!("`{text}` names a port twice: remove one of them")),
            None => Ok(ports),
        }
    }
}
