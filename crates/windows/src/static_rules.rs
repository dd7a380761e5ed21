//! The operator's own rules that every pod of a node has before policy: `static-rules.json` in Calico's format
//! (`felix/dataplane/windows/policysets/static_rules.go`). Clouds use it to keep pods away from their metadata
//! services.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
use serde::Deserialize;
use serde_json::{Map, Value};
use thiserror::Error;
use tortie_api::net::{Direction, PortRange};
use tortie_api::report::{StaticRule, StaticRuleType, StaticSide};
use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType};

use crate::acl::{ANY_PROTOCOL, FIRST_PRIORITY, NODE_PRIORITY, of_static_rule};

/// Why a file of static rules is rejected as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{at}: {problem}")]
pub struct StaticRulesError {
    /// The rule and the member.
    pub at: String,
    /// The problem.
    pub problem: String,
}

/// The rules of a file, as ACLs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StaticRules(pub(crate) Vec<Acl>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    provider: String,
    #[serde(default, rename = "version")]
    _version: Value,
    #[serde(default)]
    rules: Vec<NamedRule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedRule {
    #[serde(default)]
    name: String,
    rule: Rule,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    r#type: String,
    id: String,
    #[serde(default)]
    protocol: Option<u16>,
    action: String,
    direction: String,
    #[serde(default)]
    localaddresses: String,
    #[serde(default)]
    remoteaddresses: String,
    #[serde(default)]
    localports: String,
    #[serde(default)]
    remoteports: String,
    ruletype: String,
    priority: u16,
}

impl StaticRules {
    /// Parses a file. As in Calico's parser, the case of member names does not matter.
    ///
    /// # Errors
    /// Anything that is not understood. Then the whole file is rejected, because an ignored rule may be one that
    /// denies.
    pub fn parse(text: &str) -> Result<Self, StaticRulesError> {
        let wrong = |at: &str, problem: String| StaticRulesError { at: at.to_owned(), problem };
        let value = serde_json::from_str(text).map_err(|error| wrong("the file", error.to_string()))?;
        let file: File = serde_path_to_error::deserialize(
            without_case(value)
                .map_err(|name| wrong("the file", format!("{name:?} is there twice, in different cases")))?,
        )
        .map_err(|error| wrong(&error.path().to_string(), error.inner().to_string()))?;
        if file.provider.is_empty() {
            return Err(wrong("Provider", "it is empty".to_owned()));
        }
        let mut acls = Vec::new();
        let mut actions: BTreeMap<(String, u16), (AclAction, String)> = BTreeMap::new();
        for (number, NamedRule { name, rule }) in file.rules.into_iter().enumerate() {
            let at = format!("rule {} ({})", number + 1, if name.is_empty() { &rule.id } else { &name });
            let acl = rule
                .acl(&file.provider)
                .map_err(|(member, problem)| wrong(&format!("{at}: {member}"), problem))?;
            if acl.rule_type == AclRuleType::Switch {
                // Of two ACLs with one priority, HNS may take either (docs/hns.md, ACLs).
                let position = (acl.direction.to_string(), acl.priority);
                let (action, other) =
                    actions.entry(position).or_insert_with(|| (acl.action.clone(), at.clone()));
                if *action != acl.action {
                    let problem = format!("{} is that of {other}, which has another action", acl.priority);
                    return Err(wrong(&format!("{at}: Priority"), problem));
                }
            }
            acls.push(acl);
        }
        Ok(Self(acls))
    }
}

impl StaticRules {
    /// The rules for the node's report, in order. Those of RuleType Host have no order.
    #[must_use]
    pub fn reported(&self) -> Vec<StaticRule> {
        let mut acls: Vec<&Acl> = self.0.iter().collect();
        acls.sort_by_key(|acl| acl.priority);
        let side = |addresses: &str, ports: &str| {
            let net =
                |part: &str| part.parse::<IpNet>().or_else(|_| part.parse::<IpAddr>().map(IpNet::from)).ok();
            let range = |part: &str| {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                Some(PortRange { first: first.parse().ok()?, last: last.parse().ok()? })
            };
            StaticSide {
                nets: parts(addresses).filter_map(net).collect(),
                ports: parts(ports).filter_map(range).collect(),
            }
        };
        let reported = |acl: &Acl| StaticRule {
            name: acl.id.clone(),
            rule_type: match acl.rule_type {
                AclRuleType::Switch => StaticRuleType::Switch,
                _ => StaticRuleType::Host,
            },
            allow: acl.action == AclAction::Allow,
            after_own_node: acl.priority > NODE_PRIORITY,
            direction: if acl.direction == AclDirection::In { Direction::Ingress } else { Direction::Egress },
            protocol: acl.protocols.parse().ok(),
            local: side(&acl.local_addresses, &acl.local_ports),
            remote: side(&acl.remote_addresses, &acl.remote_ports),
        };
        acls.into_iter().map(reported).collect()
    }
}

/// The value with all member names in lower case, or a name that two members of an object then share.
fn without_case(value: Value) -> Result<Value, String> {
    match value {
        Value::Object(members) => {
            let mut lower = Map::new();
            for (name, value) in members {
                if lower.insert(name.to_ascii_lowercase(), without_case(value)?).is_some() {
                    return Err(name);
                }
            }
            Ok(Value::Object(lower))
        }
        Value::Array(values) => values.into_iter().map(without_case).collect(),
        other => Ok(other),
    }
}

impl Rule {
    /// The ACL, or the wrong member and the problem.
    fn acl(self, provider: &str) -> Result<Acl, (&'static str, String)> {
        let one_of = |member, text: &str, words: &str| (member, format!("{text:?} is none of {words}"));
        if !self.r#type.eq_ignore_ascii_case("ACL") {
            return Err(one_of("Type", &self.r#type, "ACL"));
        }
        if self.id.is_empty() {
            return Err(("ID", "it is empty".to_owned()));
        }
        let action = match self.action.as_str() {
            "Allow" => AclAction::Allow,
            "Block" => AclAction::Block,
            other => return Err(one_of("Action", other, "Allow, Block")),
        };
        let direction = match self.direction.as_str() {
            "In" => AclDirection::In,
            "Out" => AclDirection::Out,
            other => return Err(one_of("Direction", other, "In, Out")),
        };
        let rule_type = match self.ruletype.as_str() {
            "Switch" => AclRuleType::Switch,
            "Host" => AclRuleType::Host,
            other => return Err(one_of("RuleType", other, "Switch, Host")),
        };
        if self.priority == 0 || self.priority >= FIRST_PRIORITY {
            let problem =
                format!("{} is not 1 to {}: policy comes after that", self.priority, FIRST_PRIORITY - 1);
            return Err(("Priority", problem));
        }
        if self.priority == NODE_PRIORITY {
            return Err((
                "Priority",
                format!("{NODE_PRIORITY} is that of the node's own traffic to its pods"),
            ));
        }
        // Calico's parser takes absent as 0, which its writer omits, and HNS takes absent as any.
        let protocol = self.protocol.filter(|number| *number != 0).unwrap_or(ANY_PROTOCOL);
        if protocol > ANY_PROTOCOL {
            return Err(("Protocol", format!("{protocol} is not 0 to {ANY_PROTOCOL}")));
        }
        for (member, list) in
            [("LocalAddresses", &self.localaddresses), ("RemoteAddresses", &self.remoteaddresses)]
        {
            let is_net =
                |part: &str| part.parse::<Ipv4Net>().is_ok() || part.parse::<std::net::Ipv4Addr>().is_ok();
            if let Some(part) = parts(list).find(|part| !is_net(part)) {
                return Err((member, format!("{part:?} is neither an IPv4 address nor a network")));
            }
        }
        for (member, list) in [("LocalPorts", &self.localports), ("RemotePorts", &self.remoteports)] {
            if let Some(part) = parts(list).find(|part| !is_ports(part)) {
                return Err((member, format!("{part:?} is neither a port nor a range of ports")));
            }
        }
        Ok(Acl {
            protocols: protocol.to_string(),
            local_addresses: self.localaddresses,
            remote_addresses: self.remoteaddresses,
            local_ports: self.localports,
            remote_ports: self.remoteports,
            // Rules of this type have no order (AclNoHostRulePriority).
            priority: if rule_type == AclRuleType::Switch { self.priority } else { 0 },
            rule_type,
            ..of_static_rule(action, direction, &format!("{provider}-{}", self.id))
        })
    }
}

fn parts(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').filter(move |_| !list.is_empty())
}

fn is_ports(part: &str) -> bool {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    matches!((first.parse::<u16>(), last.parse::<u16>()), (Ok(first), Ok(last)) if first <= last)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in clouds: member names in varying case.
    const WIRESERVER: &str = r#"{"Provider": "azure", "version": "0.1", "Rules": [{"Name": "EndpointPolicy", "Rule": {
        "Id": "wireserver", "Type": "ACL", "Protocol": 6, "Action": "Block", "Direction": "Out",
        "RemoteAddresses": "168.63.129.16/32", "RemotePorts": "80", "Priority": 200, "RuleType": "Switch"}}]}"#;

    #[test]
    fn the_static_rules_file_of_a_cloud() {
        let StaticRules(acls) = StaticRules::parse(WIRESERVER).unwrap();
        let [acl] = &acls[..] else { panic!("{acls:?}") };
        let seen = (&*acl.id, &*acl.protocols, &*acl.remote_addresses, &*acl.remote_ports, acl.priority);
        assert_eq!(seen, ("tortie/static/azure-wireserver", "6", "168.63.129.16/32", "80", 200));
        assert_eq!((&acl.action, &acl.direction), (&AclAction::Block, &AclDirection::Out));
        assert_eq!(StaticRules::parse(r#"{"provider": "x", "rules": []}"#), Ok(StaticRules::default()));
    }

    #[test]
    fn invalid_static_rules_are_named() {
        let second = |rule: &str| {
            let head = WIRESERVER.trim_end_matches("]}");
            format!("{head}, {{\"Rule\": {rule}}}]}}")
        };
        let allow = r#"{"ID": "x", "Type": "ACL", "Action": "Allow", "Direction": "Out", "RuleType": "Switch", "Priority": 200}"#;
        let cases = [
            ("{".to_owned(), "the file: EOF while parsing"),
            (
                WIRESERVER.replace("\"Action\"", "\"action\": \"Allow\", \"Action\""),
                "the file: \"action\" is there twice",
            ),
            (WIRESERVER.replace("azure", ""), "Provider: it is empty"),
            (WIRESERVER.replace("\"Protocol\"", "\"Protocols\""), "rules[0].rule.protocols: unknown field"),
            (
                WIRESERVER.replace("\"ACL\"", "\"NAT\""),
                "rule 1 (EndpointPolicy): Type: \"NAT\" is none of ACL",
            ),
            (WIRESERVER.replace("\"Block\"", "\"Drop\""), "rule 1 (EndpointPolicy): Action: \"Drop\""),
            (WIRESERVER.replace("\"Out\"", "\"Up\""), "rule 1 (EndpointPolicy): Direction: \"Up\""),
            (WIRESERVER.replace("\"Switch\"", "\"Wire\""), "rule 1 (EndpointPolicy): RuleType: \"Wire\""),
            (WIRESERVER.replace("200", "0"), "rule 1 (EndpointPolicy): Priority: 0 is not 1 to 999"),
            (WIRESERVER.replace("200", "1000"), "rule 1 (EndpointPolicy): Priority: 1000 is not 1 to 999"),
            (
                WIRESERVER.replace("200", "900"),
                "rule 1 (EndpointPolicy): Priority: 900 is that of the node's own",
            ),
            (WIRESERVER.replace("200", "-1"), "rules[0].rule.priority: invalid value"),
            (WIRESERVER.replace(": 6,", ": 257,"), "rule 1 (EndpointPolicy): Protocol: 257"),
            (
                WIRESERVER.replace("168.63.129.16/32", "Any"),
                "rule 1 (EndpointPolicy): RemoteAddresses: \"Any\"",
            ),
            (WIRESERVER.replace("\"80\"", "\"80,90-81\""), "rule 1 (EndpointPolicy): RemotePorts: \"90-81\""),
            (WIRESERVER.replace("wireserver", ""), "rule 1 (EndpointPolicy): ID: it is empty"),
            (
                second(allow),
                "rule 2 (x): Priority: 200 is that of rule 1 (EndpointPolicy), which has another action",
            ),
        ];
        for (text, expected) in cases {
            let error = StaticRules::parse(&text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
        assert!(StaticRules::parse(&second(&allow.replace("200", "201"))).is_ok());
        assert!(StaticRules::parse(&second(&allow.replace("\"Out\"", "\"In\""))).is_ok());
    }
}
