//! The subnets that nodes can have, of both families.

use tortie_api::net::IpVersion;

use crate::config::{NetConf, SubnetRange};
use crate::lease::Subnets;

/// The subnets that nodes can have, of each family that flannel has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranges {
    pub(crate) v4: SubnetRange,
    pub(crate) v6: Option<SubnetRange>,
}

impl Ranges {
    /// The subnets of a configuration.
    ///
    /// # Errors
    /// The fields of the configuration contradict each other, or there is no IPv4. The text names the field.
    pub fn new(conf: &NetConf) -> Result<Self, String> {
        let mut ranges = [None, None];
        for network in &conf.networks {
            let version = IpVersion::of(&network.cidr.addr());
            ranges[usize::from(version == IpVersion::V6)] = Some(network.range()?);
        }
        let [v4, v6] = ranges;
        let v4 = v4.ok_or(
            "EnableIPv4 is false, and keys of leases in etcd begin with an IPv4 subnet; set it to true",
        )?;
        Ok(Self { v4, v6 })
    }

    /// Whether a node can have the subnets.
    #[must_use]
    pub fn contain(&self, subnets: &Subnets) -> bool {
        let of_v6 = match (&self.v6, subnets.v6) {
            (Some(range), Some(v6)) => range.contains(&v6.into()),
            (None, None) => true,
            _ => false,
        };
        self.v4.contains(&subnets.v4.into()) && of_v6
    }

    /// Whether the subnets are of the networks, of the lengths that all have.
    ///
    /// # Errors
    /// They are not. The text names subnet, network and length.
    pub(crate) fn fit(&self, subnets: &Subnets) -> Result<(), String> {
        self.v4.fit(&subnets.v4.into())?;
        match (subnets.v6, &self.v6) {
            (None, _) => Ok(()),
            (Some(v6), Some(range)) => range.fit(&v6.into()),
            (Some(v6), None) => Err(format!("{v6} is no subnet of flannel, whose EnableIPv6 is false")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_without_ipv4_is_refused() {
        let conf = json!({"EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fd00::/48", "Backend": {"Type": "host-gw"}});
        let refused = Ranges::new(&NetConf::parse(&conf.to_string()).unwrap()).unwrap_err();
        assert!(refused.contains("EnableIPv4 is false"), "{refused}");
    }

    #[test]
    fn subnets_fit_the_networks_and_lengths_of_the_configuration() {
        for (is_dual, name, expected) in [
            (false, "10.5.2.0-24", None),
            // Below SubnetMin, such as one of former times.
            (false, "10.5.0.0-24", None),
            (
                false,
                "10.5.0.0-16",
                Some("10.5.0.0/16 is no subnet of flannel's network 10.5.0.0/16 with length 24"),
            ),
            (false, "0.0.0.0-0", Some("0.0.0.0/0 is no subnet")),
            (false, "10.5.2.128-25", Some("10.5.2.128/25 is no subnet")),
            (false, "10.6.2.0-24", Some("10.6.2.0/24 is no subnet")),
            (false, "10.5.2.0-24&fd00::-64", Some("EnableIPv6 is false")),
            (true, "10.5.2.0-24&fd00::-64", None),
            (true, "10.5.2.0-24", None),
            (
                true,
                "10.5.2.0-24&fd00::-60",
                Some("fd00::/60 is no subnet of flannel's network fd00::/48 with length 64"),
            ),
        ] {
            let conf = json!({"Network": "10.5.0.0/16", "EnableIPv6": is_dual, "IPv6Network": "fd00::/48", "Backend": {"Type": "host-gw"}});
            let ranges = Ranges::new(&NetConf::parse(&conf.to_string()).unwrap()).unwrap();
            let refused = ranges.fit(&Subnets::of_key_name(name).unwrap()).err();
            let is_so = match expected {
                None => refused.is_none(),
                Some(expected) => refused.as_ref().is_some_and(|refused| refused.contains(expected)),
            };
            assert!(is_so, "{name}: {refused:?}");
        }
    }
}
