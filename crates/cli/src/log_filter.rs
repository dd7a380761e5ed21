//! The filter of logs: `--log-level`, `RUST_LOG`, and the level that an operator gives to a running agent.

use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

use crate::output;

/// The level of the command line.
static LOG_LEVEL: OnceLock<&str> = OnceLock::new();

/// The libraries below HTTP and TLS. With `debug`, they would log each frame; who needs that names them in `RUST_LOG`.
const BELOW_HTTP: &str = "h2=info,hyper=info,hyper_util=info,rustls=info,tower=info,tonic=info";

/// Uses this level, whatever `RUST_LOG` says.
pub(crate) fn set_level(level: &'static str) {
    let _ = LOG_LEVEL.set(level);
}

/// Reads a level. calicoctl has some words besides.
pub(crate) fn log_level(text: &str) -> Result<&'static str, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "panic" | "fatal" | "error" => "error",
        "warn" | "warning" => "warn",
        "info" => "info",
        "debug" => "debug",
        "trace" => "trace",
        _ => return Err("it is none of error, warn, info, debug and trace".to_owned()),
    })
}

/// The filter of the command line, of `RUST_LOG`, or this one, with its text.
pub(crate) fn of_process(default: &str) -> (String, EnvFilter) {
    let of_environment = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let wanted = LOG_LEVEL.get().map(|level| (*level).to_owned()).or(of_environment);
    let wanted = wanted.unwrap_or_else(|| default.to_owned());
    match parse(&wanted) {
        Ok(filter) => (wanted, filter),
        Err(problem) => {
            output::error(&format!("RUST_LOG: {problem}; the level is {default}"));
            (default.to_owned(), EnvFilter::new(default))
        }
    }
}

/// Parses a filter in the syntax of `RUST_LOG`: levels, and `TARGET=LEVEL`, separated by commas.
///
/// [`EnvFilter`] takes a misspelled level for the name of a target whose messages are all wanted, and none of others.
pub(crate) fn parse(text: &str) -> Result<EnvFilter, String> {
    let wrong = |problem: String| format!("the log level {text:?} is invalid: {problem}");
    let mut names_target = false;
    for part in text.split(',').map(str::trim) {
        let (target, level) = match part.rsplit_once('=') {
            Some((target, level)) => (Some(target), level),
            None => (None, part),
        };
        names_target |= target.is_some();
        // An empty level would be that of errors.
        let is_level = !level.is_empty() && level.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
        if !is_level || target == Some("") {
            return Err(wrong(format!(
                "{part:?} is none of off, error, warn, info, debug and trace, and no TARGET=LEVEL"
            )));
        }
    }
    // Their level would be higher than the wanted one otherwise.
    let chatty = ["debug", "trace"];
    let is_chatty =
        text.split(',').any(|part| chatty.iter().any(|level| level.eq_ignore_ascii_case(part.trim())));
    let complete = if is_chatty && !names_target { format!("{text},{BELOW_HTTP}") } else { text.to_owned() };
    complete.parse().map_err(|error| wrong(format!("{error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelled_levels_are_invalid() {
        for text in
            ["info", "DEBUG", "off", "warn,tortie_agent=debug", "tortie_agent=trace, error", "h2=debug"]
        {
            assert!(parse(text).is_ok(), "{text}");
        }
        for text in [
            "debg",
            "",
            "=loud",
            "info,",
            "tortie_agent=debg",
            "tortie_agent=",
            "warn,debg",
            "info debug",
            "=info",
        ] {
            let problem = parse(text).err().unwrap_or_else(|| panic!("{text} is valid"));
            assert!(problem.contains(&format!("{text:?} is invalid")), "{problem}");
        }
    }

    #[test]
    fn debug_is_about_tortie_and_not_about_each_frame() {
        let shown = |text: &str| parse(text).map(|filter| filter.to_string()).unwrap_or_default();
        assert!(shown("debug").contains("h2=info"), "{}", shown("debug"));
        assert!(shown("DEBUG").contains("h2=info"), "{}", shown("DEBUG"));
        assert_eq!(shown("info"), "info");
        assert!(!shown("debug,h2=trace").contains("h2=info"));
    }
}
