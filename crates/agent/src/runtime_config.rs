//! What a container runtime asks of plugins that declare a capability (`runtimeConfig`).

use serde_json::Value;
use tortie_cni::{Code, Failure, NetworkConfig};

/// Rejects what a runtime asks of Tortie's plugin. The configuration that the agent writes declares no capability, so only
/// a configuration that somebody else wrote can ask for something.
pub(crate) fn check(config: &NetworkConfig) -> Result<(), Failure> {
    let asked = match config.extra.get("runtimeConfig") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(asked)) => asked,
        Some(_) => return Err(Failure::new(Code::INVALID_CONFIG, "runtimeConfig is no object", "")),
    };
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    // `addresses` reads `ips`, the address that is asked for, and `dns` reads `dns`.
    let served = |name: &String| ["ips", "dns"].contains(&name.as_str());
    let unknown = asked.iter().find(|(name, value)| !served(name) && !is_empty(value));
    let Some((name, _)) = unknown else { return Ok(()) };
    let remedy = match name.as_str() {
        "portMappings" => "Tortie reads hostPort from the Pod itself",
        "bandwidth" => "list the plugin bandwidth after tortie-cni, with this capability",
        _ => "Tortie does not know it",
    };
    let msg =
        format!("network {} passes runtimeConfig.{name} to tortie-cni, which is not supported", config.name);
    Err(Failure::new(
        Code::NOT_SUPPORTED,
        msg,
        format!("{remedy}; take the capability {name} out of the configuration"),
    ))
}

/// The MTU of the pod's interface in the configuration (`mtu`), in bytes; 0 and none mean that of the overlay, as in Calico.
pub(crate) fn mtu(config: &NetworkConfig) -> Result<Option<u32>, Failure> {
    /// IPv4 needs this much; the kernel takes no more.
    const POSSIBLE: std::ops::RangeInclusive<u64> = 68..=65_535;
    let mtu = match config.extra.get("mtu") {
        None | Some(Value::Null) => return Ok(None),
        Some(mtu) => mtu.as_u64(),
    };
    match mtu {
        Some(0) => Ok(None),
        Some(mtu) if POSSIBLE.contains(&mtu) => Ok(u32::try_from(mtu).ok()),
        _ => {
            let msg = format!("mtu of network {} must be a number from 68 to 65535", config.name);
            Err(Failure::new(Code::INVALID_CONFIG, msg, "without it, pods have the MTU of the overlay"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_mtu_is_read_or_rejected() {
        for (value, expected) in [
            (json!(null), Ok(None)),
            (json!(0), Ok(None)),
            (json!(1400), Ok(Some(1400))),
            (json!(65_536), Err(())),
            (json!(-1), Err(())),
            (json!("1400"), Err(())),
        ] {
            let config = json!({"cniVersion": "1.0.0", "name": "n", "mtu": value});
            let read = mtu(&serde_json::from_value(config).unwrap()).map_err(|_| ());
            assert_eq!(read, expected, "{value}");
        }
    }

    #[test]
    fn what_a_runtime_asks_is_rejected_by_name() {
        let checked = |asked: Value| {
            let config = json!({"cniVersion": "1.0.0", "name": "n", "runtimeConfig": asked});
            check(&serde_json::from_value(config).unwrap()).map_err(|failure| failure.to_string())
        };
        for nothing in [
            json!(null),
            json!({}),
            json!({"portMappings": [], "dns": {"servers": ["10.96.0.10"]}, "mac": ""}),
        ] {
            assert_eq!(checked(nothing.clone()), Ok(()), "{nothing}");
        }
        for (asked, name) in [
            (json!({"portMappings": [{"hostPort": 80}]}), "runtimeConfig.portMappings"),
            (json!({"bandwidth": {"ingressRate": 1}}), "bandwidth after tortie-cni"),
            (json!({"mac": "0a:00:00:00:00:01"}), "runtimeConfig.mac"),
            (json!([1]), "no object"),
        ] {
            let problem = checked(asked.clone()).unwrap_err();
            assert!(problem.contains(name), "{asked}: {problem}");
        }
    }
}
