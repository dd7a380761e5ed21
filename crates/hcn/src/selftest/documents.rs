//! Questions that documents answer: what HNS accepts, keeps and returns.

use serde_json::{Value, json};

use super::{AclRemoval, Canary, HnsReport, LOCAL, UpdateReplaces};
use crate::schema::{
    Acl, AclAction, AclDirection, AclRuleType, Endpoint, EndpointFlags, Modify, Policy, PolicySettings,
    RequestType, SdnRoute, SetPolicy, SetPolicyType,
};
use crate::{Call, Class, Error, Feature, HcnExt, Kind};

impl Canary<'_> {
    /// ACLs that some clients write and no source explains, by what is unusual.
    fn unusual(&self) -> [(&'static str, Acl); 8] {
        let usual = || Acl { protocols: "6".to_owned(), ..self.acl(AclDirection::In, AclAction::Allow, 0) };
        [
            ("protocol 256", Acl { protocols: "256".to_owned(), ..usual() }),
            ("no protocol", Acl { protocols: String::new(), ..usual() }),
            ("port 0", Acl { local_ports: "0".to_owned(), ..usual() }),
            ("ports from 0", Acl { local_ports: "0-79".to_owned(), ..usual() }),
            ("half of all addresses", Acl { remote_addresses: "0.0.0.0/1".to_owned(), ..usual() }),
            ("all addresses", Acl { remote_addresses: "0.0.0.0/0".to_owned(), ..usual() }),
            ("ports of SCTP", Acl { protocols: "132".to_owned(), local_ports: "80".to_owned(), ..usual() }),
            ("priority of a Host rule", Acl { rule_type: AclRuleType::Host, ..usual() }),
        ]
    }

    pub(super) fn ask_by_documents(&self, report: &mut HnsReport) -> Result<(), Error> {
        report.strict = Some(self.is_strict()?);
        report.accepts_taken_addresses = self.accepts_taken_addresses()?;
        for (name, acl) in self.unusual() {
            report.accepts.insert(name.to_owned(), self.takes(vec![Policy::of(&acl)])?);
        }
        self.ask_what_is_returned(report)?;
        report.acl_removal = Some(self.acl_removal()?);
        report.update_replaces = Some(self.update_replaces()?);
        report.accepts_nested_sets = self.accepts_nested_sets()?;
        Ok(())
    }

    fn is_strict(&self) -> Result<bool, Error> {
        let mut document = json!(self.endpoint(Vec::new()));
        document["TortieSelftest"] = json!(1);
        let call = Call::Create {
            kind: Kind::Endpoint,
            network: self.network,
            id: crate::Guid::ZERO,
            settings: document.to_string(),
        };
        let before = self.hcn.endpoints_of_network(self.network)?.len();
        // The result alone does not tell why.
        let _ = self.hcn.call(&call);
        let made = self.hcn.endpoints_of_network(self.network)?;
        made.iter().try_for_each(|endpoint| self.hcn.delete_endpoint(endpoint.id))?;
        Ok(made.len() == before)
    }

    /// A remote endpoint that kube-proxy has left has the address of a new pod.
    fn accepts_taken_addresses(&self) -> Result<Option<bool>, Error> {
        let remote = Endpoint {
            flags: EndpointFlags::REMOTE_ENDPOINT,
            routes: Vec::new(),
            mac_address: "02-11-C6-12-00-09".to_owned(),
            ..self.endpoint(Vec::new())
        };
        // A build that wants more members in a remote endpoint leaves this open, and the other questions are asked.
        let Ok(id) = self.hcn.create_endpoint(&remote) else { return Ok(None) };
        let taken = self.takes(Vec::new());
        self.hcn.delete_endpoint(id)?;
        taken.map(Some)
    }

    fn ask_what_is_returned(&self, report: &mut HnsReport) -> Result<(), Error> {
        let sent = self.acl(AclDirection::In, AclAction::Allow, 0);
        let endpoint = self.endpoint(vec![Policy::of(&sent)]);
        let id = self.hcn.create_endpoint(&endpoint)?;
        report.keeps_ids = Some(id == endpoint.id);
        let returned = self.hcn.endpoint(id);
        self.hcn.delete_endpoint(id)?;
        let returned = returned?;
        let settings =
            returned.policies.iter().find(|policy| policy.is::<Acl>()).map(|policy| &policy.settings);
        let member =
            |name: &str| settings.and_then(|settings| settings.get(name)).filter(|value| !value.is_null());
        report.keeps_acl_ids = Some(member("Id").and_then(Value::as_str) == Some(sent.id.as_str()));
        let zeroes = ["Action", "Direction", "LocalAddresses", "RemotePorts"].into_iter();
        report.returned_zeroes =
            Some(zeroes.filter(|name| member(name).is_some()).map(str::to_owned).collect());
        Ok(())
    }

    fn acl_removal(&self) -> Result<AclRemoval, Error> {
        let policy = Policy::of(&self.acl(AclDirection::In, AclAction::Allow, 0));
        self.with_endpoint(vec![policy.clone()], |id| {
            let removed = self.hcn.modify_endpoint(id, &Modify::policies(RequestType::Remove, vec![policy]));
            let is_there = self.has::<Acl>(id)?;
            Ok(match (removed, is_there) {
                (_, false) => AclRemoval::Works,
                (Ok(()), true) => AclRemoval::IgnoredSilently,
                (Err(_), true) => AclRemoval::RefusedAlways,
            })
        })
    }

    fn update_replaces(&self) -> Result<UpdateReplaces, Error> {
        let route = SdnRoute {
            destination_prefix: "198.19.0.0/16".to_owned(),
            need_encap: true,
            ..Default::default()
        };
        self.with_endpoint(vec![Policy::of(&route)], |id| {
            let acls = vec![Policy::of(&self.acl(AclDirection::In, AclAction::Allow, 0))];
            self.hcn.modify_endpoint(id, &Modify::policies(RequestType::Update, acls))?;
            if !self.has::<SdnRoute>(id)? {
                return Ok(UpdateReplaces::All);
            }
            let others = vec![Policy::of(&route)];
            self.hcn.modify_endpoint(id, &Modify::policies(RequestType::Update, others))?;
            Ok(if self.has::<Acl>(id)? { UpdateReplaces::SameType } else { UpdateReplaces::AclsAndSameType })
        })
    }

    /// A version without sets does not have them, either.
    fn accepts_nested_sets(&self) -> Result<Option<bool>, Error> {
        if !self.version.supports(Feature::SetPolicy) {
            return Ok(None);
        }
        let inner = set("tortie-inner", SetPolicyType::IpSet, own());
        let outer = set("tortie-outer", SetPolicyType::NestedIpSet, "tortie-inner".to_owned());
        let change = |kind, set: &Policy| Modify::policies(kind, vec![set.clone()]);
        self.hcn.modify_network(self.network, &change(RequestType::Add, &inner))?;
        let is_taken = self.accepts(&change(RequestType::Add, &outer))?;
        if is_taken {
            self.hcn.modify_network(self.network, &change(RequestType::Remove, &outer))?;
        }
        self.hcn.modify_network(self.network, &change(RequestType::Remove, &inner))?;
        Ok(Some(is_taken))
    }

    /// Whether HNS accepts a change of the network. Only an unavailable HNS is an error.
    pub(super) fn accepts(&self, request: &Modify) -> Result<bool, Error> {
        match self.hcn.modify_network(self.network, request) {
            Ok(()) => Ok(true),
            Err(error) if error.class() == Class::Unavailable => Err(error),
            Err(_) => Ok(false),
        }
    }

    fn has<T: PolicySettings>(&self, endpoint: crate::Guid) -> Result<bool, Error> {
        Ok(self.hcn.endpoint(endpoint)?.policies.iter().any(Policy::is::<T>))
    }
}

/// A set as a policy of the network.
pub(super) fn set(id: &str, policy_type: SetPolicyType, values: String) -> Policy {
    let extra = Default::default();
    Policy::of(&SetPolicy { id: id.to_owned(), name: String::new(), policy_type, values, extra })
}

/// The address of the endpoint, as a list in an ACL.
pub(super) fn own() -> String {
    LOCAL.to_string()
}
