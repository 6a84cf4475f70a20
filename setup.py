"""Package metadata, read from `settings.ini`: the one place where it is written down."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read("settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]
package = settings["lib_name"]

setup(
    name=package,
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    author=settings["author"],
    license=settings["license"].upper(),
    keywords=settings["keywords"],
    python_requires=">=" + settings["min_python"],
    packages=[package],
    package_data={package: ["py.typed", "configs/*.json"]},
    install_requires=settings["requirements"].split(),
    extras_require={name.removesuffix("_requirements"): needed.split()
                    for name, needed in settings.items() if name.endswith("_requirements")},
    entry_points={group: settings[group].split() for group in ("console_scripts", "pytest11")},
    zip_safe=False,
)
