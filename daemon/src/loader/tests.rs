use super::*;
use crate::config::CatalogModel;

#[test]
fn models_of_the_start_are_on_the_devices_of_the_catalog_and_go_by_their_aliases() {
    let catalog = "[catalog.large]\npath = 'tiny'\ndevice = 'cuda:1'\naliases = ['l']\n\
                   [catalog.small]\npath = 'draft'\ndevice = 'auto'";
    let text = format!("device = 'cpu'\nmodels = ['tiny', 'l', 'small']\n{catalog}");
    let config = Config::parse(&text).expect("valid");
    let models = config.models.iter().map(|choice| (choice.clone(), ())).collect();
    let found = by_device(models, &config);
    let found: Vec<_> = found
        .iter()
        .map(|(device, models)| {
            (*device, models.iter().map(|(choice, ())| choice.as_str()).collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(found, [(Device::Cpu, vec!["tiny", "small"]), (Device::Ordinal(1), vec!["l"])]);
    assert_eq!(open_model("l", &config).expect("it is there").name, "large");
    let twice = Config { models: vec!["l".to_owned(), "large".to_owned()], ..config };
    let twice = open_models(&twice.models, &twice).expect_err("it is one model");
    assert!(matches!(twice, DaemonError::GivenTwice { .. }), "{twice}");
}

#[test]
fn a_model_of_the_start_by_its_alias_is_the_default() {
    let folder = tempfile::tempdir().expect("a folder");
    let small = CatalogModel {
        path: "draft".to_owned(),
        aliases: vec!["s".to_owned()],
        device: Some(Device::Cpu),
        ..CatalogModel::default()
    };
    let config = Config {
        models: vec!["tiny".to_owned(), "s".to_owned()],
        catalog: [("small".to_owned(), small)].into(),
        device: Device::Cpu,
        ..Config::default()
    };
    let loader = Loader::start(config, folder.path().to_owned(), Fittings::default(), &|_| {});
    assert_eq!(names(&loader.expect("it loads").models().now()), ["tiny", "small"]);
}
