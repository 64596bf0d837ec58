"""Words next to a number, by what they do to it: the vocabulary of ``gcore_rewards.answers``.

A harmless word leaves a number what it is. Which words are harmless depends on the language:

English, before and behind: every word but those that are listed as changing a number.
Other languages, before: a word that is listed as harmless, or a longer one in a sentence, which is
    its verb or says who.
Other languages, behind: every word but those that are listed as changing a number, and short ones.
    What is counted stands there, and no list holds that. The words for "or", "to", "times" and
    "per" are short everywhere.
"""

from __future__ import annotations

import re


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


def _stems(*lines: str) -> re.Pattern[str]:
    """Returns a pattern of words that begin with one of the stems; a "$" ends a whole word."""
    return re.compile("|".join(" ".join(lines).split()), re.IGNORECASE)


#: Words that make another number of the one behind them, a line for each reason.
CHANGING_BEFORE = _words(
    # functions: "sqrt 16"
    "sqrt root cbrt log ln lg lb exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh",
    "abs floor ceil ceiling round gcd lcm hcf max min mod modulo",
    "wurzel quadratwurzel racine raíz raiz radice корень hälfte halbe doppelte moitié double mitad",
    "doble metà metade doppio dobro половина вдвое durch hoch",
    # operations: "minus 5"
    "minus negative plus times divided multiplied half twice thrice double doubled triple tripled",
    "quadruple squared cubed base point non sub",
    "menos moins meno mínus negativo negativa négatif négative negativ minos мінус минус плюс",
    # bounds: "at least 5"
    "over under above below beyond than least most exceed exceeds exceeded exceeding almost nearly",
    "lt gt le ge leq geq ne neq between versus vs maximum minimum within until till past",
    "mindestens höchstens maximal minimal bis hasta jusqu'à até fino máximo mínimo massimo minimo",
    "fast knapp beinahe casi presque quasi почти bijna nästan prawie",
    # denials: "not 5"
    "except without no not never neither nor cannot",
    "nicht kein keine keinen nein pas jamais sans não nunca sem ninguno nessun senza не нет без",
    # labels: "figure 5"
    "version ver section chapter equation eq fig figure theorem lemma page nr table exercise",
    "question option appendix column",
    # dates
    "jan feb mar apr may jun jul aug sept oct nov dec january february march april june july",
    "august september october november december",
)
#: Words that multiply the number before them: "5 million".
SCALES = _words(
    "hundred hundreds thousand thousands million millions billion billions trillion trillions",
    "quadrillion quintillion dozen dozens score gross lakh lakhs crore crores myriad myriads fold",
    "mil mill mio mln mn mrd bn tn doz mille tausend millionen milliarde milliarden millón",
    "millones milhão milhões milione milioni miliardi тысяч тыс млн млрд",
    "grand thou teur keur meur mia mld mds md tsd трлн",
)
#: The beginnings of such words of other languages: "5 Dutzend", "5 миллионов".
_SCALE_STEMS = _stems(
    # millions and what is above
    r"(?:b|m|tr|quadr)[iíy]l+[hijy]*[oóõãuò][nneõãoe] milh[ãõ] bilh[ãõ] trilh[ãõ] mil+[ij]ard",
    r"milyar milyon miljo миль?л миль?ярд миллиард мільй мільяр бил+и трил+и трлн",
    # hundreds and thousands
    r"\w*tausend \w*hundert duizend honderd tusen hundra tysi[ąa]c tisíc mil+i?er millar mil?har",
    r"mi(?:gl|ll)iai mila$ тыс тис[яч] сот(?:ен|н|ня) centen centin centain cientos",
    # tens and dozens
    r"dutzend docena douzaine dozzin d[úu]zia dezen decen decin dizain dziesi tucat",
    r"десят дюжин ribu$ juta$ triệu$ nghìn$ ngàn$ miliar",
)
#: Words that make another number of the one before them, a line for each reason.
CHANGING_BEHIND = SCALES | _words(
    # parts: "5 eighths"
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh",
    "sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths",
    "millionth millionths percentile percentage permille promille ppm bps pp p.p",
    # operations: "5 plus"
    "plus minus times divided multiplied over mod modulo choose squared cubed factorial power pi",
    "root point negative",
    "below under unter sous bajo sotto abaixo ниже",
    "fois veces volte vezes menos moins meno weniger mehr mais komma coma virgule virgola vírgula",
    "hoch elevado elevada élevé elevato quadrat quadrato cuadrado carré quadrado alla",
    # another number follows: "5 or 6"
    "or through thru versus vs oder hasta",
    # another base: "101 binary"
    "hex hexadecimal binary octal base",
    # a number that is not meant exactly, denials: "5 ish", "5 isn't"
    "ish isn't wasn't aren't",
    # dates and times of day: "5 am", "5 May"
    "am pm a.m p.m o'clock uhr jan feb apr jun jul aug sept oct nov dec may",
)
#: The beginnings of such words, in English and other languages.
_CHANGING_BEHIND_STEMS = _stems(
    # parts
    r"(?:eleven|twelf|\w+teen|\w+tie)ths?$ (?:vier|fünf|sechs|sieb|ach|neun|zehn|drit)\w*tel$",
    r"\w*stel$ \w+i[eè]mes?$ tiers$ quarts?$ demi einhalb halb anderthalb",
    r"terci cuart quint sext s[eé]ptim octav noven d[eé]cim cent[eé]sim mil[eéi]+sim medi[oa]s?$",
    r"terz[oi]$ quart[oi]s?$ sest[oi]$ settim[oi]$ ottav[oi]$ mezz[oi]$ ter[çc]os?$ oitav meios?$",
    r"трет[ьи] четверт пят(?:ая|ых) шест(?:ая|ых) седьм восьм девят сот(?:ая|ых) тысячн половин",
    # shares of a hundred or a thousand
    r"prozentpunkt promille промилле процентн",
    # bounds, operations, and another number that follows
    r"m[ií]nim m[aá]xim миним максим минус плюс раз(?:а|дел)?$ умнож степен квадрат куб(?:е|а)?$",
    r"целы запят или больше более",
    # dates
    r"(?:januar|februar|march$|march,|april|june$|july$|august$|septemb|octob|novemb|decemb)",
    r"(?:jänner|märz$|mai$|juni$|juli$|oktob|dezemb)",
    r"(?:janvier|février|mars$|avril|juin$|juillet|août|septembre|octobre|décembre)",
    r"(?:enero|febrero|marzo$|abril|mayo$|junio|julio|agosto|septiembre|octubre|noviembre)",
    r"(?:diciembre|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre)",
    r"(?:janeiro|fevereiro|março|maio$|junho|julho|setembro|outubro|novembro|dezembro)",
    r"(?:январ|феврал|марта?$|апрел|мая$|июн|июл|август|сентябр|октябр|ноябр|декабр)",
)


def changes_before(word: str) -> bool:
    """Returns whether a word makes another number of the one behind it, in any language.

    word: in small letters.
    """
    return word in CHANGING_BEFORE


def changes_behind(word: str) -> bool:
    """Returns whether a word makes another number of the one before it, in any language.

    word: in small letters.
    """
    word = word.replace("’", "'")
    if word in CHANGING_BEHIND:
        return True
    return bool(_SCALE_STEMS.match(word) or _CHANGING_BEHIND_STEMS.match(word))


# -- what is known of a language -------------------------------------------------------------------

#: Words that only English has, and that most of its sentences have.
_ENGLISH = _words(
    "the and that this there they she it its with which would from have been were each every",
    "answer equals you your his their if then when how many more than into by since because thus",
    "hence therefore number we are left does what also still after before first second all any but",
    "know them him both other some thanks who whose let dollars hours days weeks years months",
    "people ways books apples eggs miles feet pounds students children boxes inches writes",
)
_LATIN_WORD = re.compile(r"[a-z]+", re.IGNORECASE)


def is_english(text: str) -> bool:
    """Returns whether a text has a word that shows it to be English."""
    return any(word.casefold() in _ENGLISH for word in _LATIN_WORD.findall(text))


#: Words that may stand before a number and leave it what it is, by language.
_HARMLESS_BEFORE = _words(
    # English
    "is are was were be been equals equal gives give gave get gets got makes make made yields",
    "yield leaves leave leaving left has have had costs cost pays paid needs need takes take took",
    "uses used sold sells bought buys earns earned spends spent saves saved reads read wins won",
    "eats ate drinks drank runs ran walks walked drives drove weighs weighed lasts contains",
    "includes holds gets receives received given collects collected remains remain becomes became",
    "total totals sum answer result solution value number count amount about approximately roughly",
    "around exactly only just precisely so then thus therefore hence finally again that this the a",
    "an its to of there it us still altogether and ans final",
    "in be pay think believe output buy eat spend earn save sell",
    # money
    "usd eur gbp jpy cny inr chf cad aud rub brl mxn krw sek nok dkk pln try zar rs rm kr nt hk r$",
    # German
    "ist sind war waren es hat haben habe hatte ergibt macht beträgt lautet kostet bleiben bleibt",
    "braucht gleich antwort ergebnis lösung wert summe anzahl insgesamt zusammen also genau nur",
    "somit daher folglich mithin gibt etwa ungefähr rund circa ca das bekommt erhält verkauft",
    "kauft",
    # French
    "est sont fait font a ont donne vaut égale coûte reste réponse résultat valeur somme nombre",
    "environ exactement seulement donc alors c'est",
    # Spanish
    "es son era hay tiene tienen da dan vale igual cuesta quedan queda respuesta resultado valor",
    "suma número aproximadamente exactamente solo sólo luego entonces necesita compra vende",
    # Italian
    "è sono ha hanno fa dà vale uguale costa restano rimangono risposta risultato valore somma",
    "numero esattamente quindi allora",
    # Portuguese
    "é são há tem têm dá vale igual custa restam sobram resposta soma exatamente então logo",
    "portanto",
    # Russian and Ukrainian
    "равно равен равна равны это будет получаем получим получится получается осталось остаётся",
    "остается ответ результат всего итого стоит около примерно ровно сумма значение было значит",
    "дорівнює відповідь",
    # Dutch, Polish, Swedish, Turkish, Indonesian, Vietnamese, Greek, Hebrew, Arabic
    "antwoord odpowiedź jest wynosi är svaret svar cevap adalah jawabannya là bằng είναι απάντηση",
    "ίσον היא הוא הוא התשובה هو هي يساوي الجواب",
)
#: What may stand before "of" in other languages: "un total de 5".
_TOTAL_OF = re.compile(
    r"\b(?:total|totale|suma|somme|somma|soma|promedio|moyenne|summe|es|est|é|è|"
    r"respuesta|réponse|risposta|resposta|valor|valeur|valore) (?:de|di|von)$"
    r"|\b(?:en|au|in|no|em) total[e]?$",
    re.IGNORECASE,
)
#: Words that deny what a clause says, or say that it is a bound.
_DENIALS = _words(
    "no not non nicht kein keine keinen keiner nie niemals weder pas ne jamais ni nunca jamás",
    "tampoco mai né não nem sem sin sans ohne senza nessun nessuno ninguno ninguna niet geen nie",
    "inte ikke ej не нет ни без нельзя никогда немає δεν όχι לא ليس değil bukan không",
    "unless except weniger mehr menos moins meno más più fino hasta больше меньше более менее",
)
_CLAUSE_WORD = re.compile(r"[^\W\d_]+")
_CLAUSE_END = re.compile(r"[.!?;:,]\s")


def is_harmless_before(left: str, word: str) -> bool:
    """Returns whether a word of another language leaves the number behind it what it is.

    left: the text up to the number, which ends with the word. word: in small letters.
    """
    clause = _CLAUSE_END.split(left)[-1].casefold()
    words = _CLAUSE_WORD.findall(clause)
    if any(one in _DENIALS for one in words) or "n'est" in clause:
        return False
    # "Elle paie 12": in a sentence it is a verb, or says who. Short ones are as "de" and "von" are,
    # and behind another number it may say what to do with both: "10 geteilt durch 5".
    is_of_sentence = len(words) > 1 and len(word) > 3 and not any(map(str.isdigit, clause))
    return is_of_sentence or word in _HARMLESS_BEFORE or bool(_TOTAL_OF.search(left))


def is_label(word: str) -> bool:
    """Returns whether a word of English is written as a name, as that of "Table 5" is.

    word: as it is written.
    """
    return word[0].isupper() and word.casefold() not in _HARMLESS_BEFORE


#: Words of at most three letters that may stand behind a number.
_SHORT_BEHIND = _words(
    "kg mg km cm mm dm nm hm ml cl dl ha kb mb gb tb ms hz kw ft in yd mi lb lbs oz qt pt gal mph",
    "kph kmh hr hrs min sec sek std day wk mo yr yrs an ans año ano ore ora dni usd eur gbp jpy",
    "cny inr chf cad aud rub brl mxn krw sek nok dkk pln kr rs m",
    "руб грн лет год м кг км см мм г л ч",
    "мин сек шт men cup egg car box dog cat pet pen toy hat bag bus fox ant bee kid boy cow hen",
    "pig key map can per is are was as so if the it he she we and but who all not pts pcs ea kn kj",
    "bpm jar pie bar nut gem gum tie cab cap net row job pkg kr",
)


def is_harmless_behind(word: str) -> bool:
    """Returns whether a word of another language may name what is counted.

    word: in small letters.
    """
    return len(word) > 3 or word in _SHORT_BEHIND
