"""German sentences in the manner of news, put together from parts: something to translate for heads in training."""

from __future__ import annotations

import random

WHO = (
    "Die Bundesregierung",
    "Der Bürgermeister von Leipzig",
    "Eine Sprecherin der Polizei",
    "Der Vorstand des Unternehmens",
    "Die Europäische Kommission",
    "Der Trainer der Mannschaft",
    "Ein Forscherteam aus Zürich",
    "Die Gewerkschaft",
    "Der Präsident",
    "Das Verfassungsgericht",
    "Die Feuerwehr",
    "Ein Sprecher des Ministeriums",
    "Die Bank",
    "Der Verein",
    "Die Opposition",
    "Der Hersteller",
    "Die Universität Wien",
    "Das Krankenhaus",
    "Der Flughafenbetreiber",
    "Die Zentralbank",
    "Der Regisseur",
    "Die Schriftstellerin",
    "Der Landwirt",
    "Die Verkehrsbehörde",
)
SAYS = (
    "kündigte am {day} an",
    "teilte {time} mit",
    "erklärte in {city}",
    "bestätigte gegenüber Journalisten",
    "warnte davor",
    "betonte in einem Interview",
    "gab bekannt",
    "sagte im Gespräch mit der Zeitung",
    "räumte ein",
    "forderte erneut",
)
THAT = (
    "dass die Preise für Strom im kommenden Jahr weiter steigen werden",
    "dass mehrere hundert Arbeitsplätze in Gefahr sind",
    "dass die neue Brücke erst im Herbst eröffnet werden kann",
    "dass bei dem Unfall niemand schwer verletzt wurde",
    "dass die Zahl der Studenten deutlich zugenommen hat",
    "dass der Vertrag bis zum Ende der Saison verlängert wird",
    "dass die Verhandlungen mit den Partnern gescheitert sind",
    "dass der Umbau des Bahnhofs rund zwanzig Millionen Euro kosten soll",
    "dass die Ergebnisse der Untersuchung bald veröffentlicht werden",
    "dass ein neues Gesetz zum Schutz der Umwelt vorbereitet wird",
    "dass viele Familien eine günstige Wohnung suchen",
    "dass das Stadion modernisiert werden muss",
    "dass die Verdächtigen noch in der Nacht festgenommen wurden",
    "dass Fahrräder und Busse künftig Vorrang haben sollen",
    "dass der Film im Sommer in die Kinos kommt",
    "dass das Flugzeug wegen schlechten Wetters nicht landen konnte",
    "dass die Ärzte mehr Zeit für ihre Patienten brauchen",
    "dass die Ausstellung bis Ende März verlängert wird",
    "dass die Firma ihre Fabrik in Polen schließen will",
    "dass ein Drittel der Befragten mit der Regierung unzufrieden ist",
)
PLAIN = (
    "Nach Angaben der Behörden wurden bei dem Sturm mindestens {n} Menschen verletzt .",
    "Der Umsatz stieg im dritten Quartal um {n} Prozent auf {m} Millionen Euro .",
    "Wer in {city} eine Wohnung sucht , muss oft monatelang warten .",
    "Seit {year} arbeitet er als Lehrer in {city} und schreibt nebenbei Romane .",
    "Das Spiel endete nach Verlängerung mit {a} zu {b} .",
    "Die meisten Besucher kamen mit dem Zug aus {city} und {city2} .",
    "Im Jahr {year} zog die Familie nach {city} , wo sie ein kleines Geschäft eröffnete .",
    "Ich habe lange überlegt , ob ich die Stelle in {city} annehmen soll .",
    "Wir müssen gemeinsam eine Lösung finden , bevor es zu spät ist .",
    "Die Straße zwischen {city} und {city2} bleibt bis {day} gesperrt .",
    "Viele Kinder lernen heute schon in der Grundschule eine zweite Fremdsprache .",
    "Ein {n} Jahre alter Mann ist am {day} in {city} von einem Auto erfasst worden .",
    "Das Museum zeigt mehr als {m} Bilder aus dem neunzehnten Jahrhundert .",
    "Auch in {city} wird das Wetter in den nächsten Tagen kühler und regnerisch .",
    "Bereits zum {n}. Mal trafen sich Wissenschaftler aus aller Welt in {city} .",
    "Dabei ging es vor allem um die Frage , wie man den Verkehr in den Städten verringern kann .",
    "Sie gewann die Goldmedaille und stellte mit {a},{n} Sekunden einen neuen Rekord auf .",
    "Das Geld soll vor allem Schulen und Krankenhäusern in {city} zugutekommen .",
    "Gesundheit : Warum wir im Winter mehr schlafen sollten",
    "Neue Technik macht Windräder leiser und billiger",
    "Streit um den Haushalt : Koalition in {city} vor dem Aus",
)
DAYS = (
    "Montag",
    "Dienstag",
    "Mittwoch",
    "Donnerstag",
    "Freitag",
    "Samstag",
    "Sonntag",
)
TIMES = (
    "am Abend",
    "am frühen Morgen",
    "in dieser Woche",
    "vor wenigen Tagen",
    "nach langen Verhandlungen",
    "im vergangenen Jahr",
    "heute",
)
CITIES = (
    "Berlin",
    "München",
    "Hamburg",
    "Köln",
    "Wien",
    "Brüssel",
    "Frankfurt",
    "Stuttgart",
    "Dresden",
    "Genf",
    "Paris",
    "London",
)


def sentence(chance: random.Random) -> str:
    """One sentence, its punctuation set off as in the corpora of translation tasks."""
    fields = {
        "day": chance.choice(DAYS),
        "time": chance.choice(TIMES),
        "city": chance.choice(CITIES),
        "city2": chance.choice(CITIES),
        "n": chance.randint(3, 70),
        "m": chance.randint(80, 950),
        "year": chance.randint(1948, 2016),
        "a": chance.randint(1, 9),
        "b": chance.randint(0, 5),
    }
    if chance.random() < 0.45:
        return chance.choice(PLAIN).format(**fields)
    said = f"{chance.choice(WHO)} {chance.choice(SAYS).format(**fields)} , {chance.choice(THAT)}"
    if chance.random() < 0.3:
        said += f" , und {chance.choice(THAT)}"
    return said + " ."
